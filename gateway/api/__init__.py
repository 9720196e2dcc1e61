"""API for clients: the table of the dialects' operations, and routes that belong to no dialect."""
