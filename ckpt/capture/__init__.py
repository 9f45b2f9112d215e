"""Captures: the state that `step()` saw, copied into a slot."""
