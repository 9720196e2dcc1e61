"""Other daemons whose models are served here, the choice among them, and failover of their streams."""
