"""Cupcake: which gradients are compressed and communicated together."""
