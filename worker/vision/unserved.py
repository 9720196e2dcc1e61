"""Unsupported media of a model that is loaded for text only."""


class UnsupportedVision(Exception):
    """Reason why a model takes text only, for reports of its modalities."""
