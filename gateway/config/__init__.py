"""Configuration: its file, its settings and the names that clients use."""
