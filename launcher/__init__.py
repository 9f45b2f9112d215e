"""The `resilient-run` command: torch's launcher, an etcd v3 rendezvous, warm workers, the link to the daemon."""
