"""How daemons of different hosts know each other: the run's secret, certificates made from it, TLS over sockets."""
