"""Decisions: yes or no, one of several options, or a level, each with its probability."""
