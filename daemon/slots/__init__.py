"""The slots of a host in shared memory: made, adopted, budgeted, copied."""
