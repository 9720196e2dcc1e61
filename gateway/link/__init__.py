"""Link to the workers: sockets, sequences in flight or parked, and pending calls."""
