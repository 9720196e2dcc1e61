"""Wire protocol between the gateway and its workers. Imports neither side."""

__version__ = "0.1.0"
