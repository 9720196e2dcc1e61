"""Metrics and logs."""

__all__ = ["log_file", "logs", "metrics", "scrape"]
