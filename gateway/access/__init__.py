"""Access of clients: API keys, callers, rate limits, budgets and the audit log."""

__all__ = [
    "audit_log",
    "audit_trail",
    "caller",
    "key",
    "key_addresses",
    "key_file",
    "keyring",
    "ledger",
    "rate_limit",
    "strangers",
    "usage",
]
