"""Ollama's dialect: chats, completions, embeddings and pulls, as lines of JSON."""
