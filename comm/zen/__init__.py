"""Zen: sparse gradients over balanced parallelism, its hash, its formats, and the schemes beside it."""
