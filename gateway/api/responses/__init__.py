"""OpenAI's Responses dialect, with the store of responses."""
