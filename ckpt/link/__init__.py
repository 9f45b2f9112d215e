"""The trainer's connection to the daemon of its host, and what its environment says."""
