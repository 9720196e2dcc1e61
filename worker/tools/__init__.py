"""Programs beside the worker: verify, calibrate and repack."""
