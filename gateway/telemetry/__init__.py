"""Metrics and logs."""

__all__ = ["log_file", "log_line", "logs", "metrics", "scrape"]
