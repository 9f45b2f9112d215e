"""The connection to the daemon of this host, a trainer's with what its environment says."""
