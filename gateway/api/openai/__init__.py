"""OpenAI's dialect: chat and text completions."""

__all__ = ["chat", "completions", "lowering", "messages", "request", "response", "tools"]
