"""Engine: the step loop, its batch, queue, sampling and self-check."""
