"""Faults on purpose, as this host carries them out."""
