"""The page: its files, its log-in, and the JSON routes and the feed behind it."""
