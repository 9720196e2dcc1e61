"""The refusal of an adapter."""


class UnusableAdapter(Exception):
    """An adapter cannot be served; the reason, for the operator."""
