"""Ollama's dialect: chats, completions, embeddings and pulls, streamed as lines of JSON."""
