"""Engine: the step loop, its batch, queue and self-check."""
