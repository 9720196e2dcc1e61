"""Configuration files of clients: Claude Code, Codex and others."""
