"""Peers: other daemons whose models are served here, the choice among them, and failover of their streams."""

__all__ = ["explanation", "fleet", "peer_stream", "placement", "upstream_client"]
