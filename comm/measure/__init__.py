"""Measures: how long schemes take, what links and compressors cost, and how sparse gradients are."""
