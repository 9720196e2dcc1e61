"""Command-line programs beside the worker: verify, calibrate and repack."""
