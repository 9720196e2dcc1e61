"""The web page: its files, its login, and the JSON routes and the feed that it uses."""
