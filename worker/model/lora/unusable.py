"""Exception for adapters that cannot be served."""


class UnusableAdapter(Exception):
    """Raised with the operator's reason when an adapter cannot be served."""
