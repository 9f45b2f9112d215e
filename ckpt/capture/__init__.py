"""Captures behind training: copied into a slot, with a proof that what was copied is what `step()` saw."""
