"""Who is trusted: places that are a user's alone, the run's secret, certificates made from it, TLS over sockets."""
