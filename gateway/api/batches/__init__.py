"""Files and batches: requests that clients leave, and that run while nothing else does."""
