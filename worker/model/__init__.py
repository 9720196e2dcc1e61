"""Model in memory: its load, its lane and the memory that it leaves."""
