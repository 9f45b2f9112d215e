"""What a run says of itself in etcd, and what follows from it: rounds, commits, observations, faults, hangs."""
