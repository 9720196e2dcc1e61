"""Command-line programs that use the worker's code: verify, calibrate and repack."""
