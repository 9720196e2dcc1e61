"""Access of clients: API keys, callers, rate limits, budgets and the audit log."""
