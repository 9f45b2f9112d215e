"""What a monitoring system and a browser are told of a host: its daemon is asked for each answer."""
