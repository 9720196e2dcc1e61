"""Link to the workers: sockets, sequences in flight and pending calls."""
