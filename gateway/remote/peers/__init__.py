"""Other daemons whose models this daemon serves, the choice among them, and failover of their streams."""
