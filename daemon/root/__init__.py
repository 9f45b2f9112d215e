"""The root of a run: it sees everything, commits, and decides about failures."""
