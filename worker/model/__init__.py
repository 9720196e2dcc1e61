"""Model in memory: its loading, its batch mode and the memory that it leaves."""
