"""How workers are started: forked from a process that has imported torch, and bound to their launcher."""
