"""Unserved media of a model: the model is loaded, and takes text alone."""


class UnsupportedVision(Exception):
    """The reason why a model takes text alone, for those who ask what it takes."""
