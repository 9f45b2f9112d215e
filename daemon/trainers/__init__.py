"""The processes of this host that talk to the daemon: its unix socket, and one session for each trainer."""
