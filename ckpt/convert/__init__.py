"""Checkpoints of other forms: exported for plain PyTorch, imported to begin a run."""
