"""Link to the workers: sockets, sequences in flight and pending calls."""

__all__ = ["calls", "collector", "events", "link", "sequence", "transport"]
