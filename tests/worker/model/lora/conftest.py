"""The tiny models of this folder have two layers."""

from tests.support.shallow import model_folder

__all__ = ["model_folder"]
