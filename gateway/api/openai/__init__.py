"""OpenAI's dialect: chat and text completions, embeddings."""

__all__ = ["chat", "completions", "embeddings", "lowering", "messages", "request", "response", "tools"]
