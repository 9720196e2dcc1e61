"""The refusal of an adapter."""


class Unusable(Exception):
    """An adapter cannot be served; the reason, for the operator."""
