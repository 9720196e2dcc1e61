"""API that clients use: routes beside the dialects, and the table of all operations."""
