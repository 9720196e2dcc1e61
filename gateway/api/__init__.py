"""API for clients: routes that belong to no dialect, and the table of the dialects' operations."""
