"""Checkpoints: slot format, placement, wire format (torch-free) and the trainer-side `Checkpointer`."""
