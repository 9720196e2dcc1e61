"""Start of a worker by kind of model, and the intake of its requests."""
