"""Gradient compressors, and what a rank remembers so that compression loses nothing for good."""
