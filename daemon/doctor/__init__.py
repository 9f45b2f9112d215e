"""What `resilientctl doctor` looks at: the host, its network, etcd and the runs here; each finding has its remedy."""
