"""The registered objects as one tree of tensors, and that tree loaded back: exactly, or not at all."""
