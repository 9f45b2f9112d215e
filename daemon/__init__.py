"""`resilientd`, the daemon of one host: keeps checkpoints in shared memory, replicates and commits them; torch-free."""
