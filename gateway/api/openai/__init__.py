"""OpenAI's dialect: chat and text completions, embeddings, audio."""

__all__ = [
    "chat",
    "completions",
    "embeddings",
    "lowering",
    "messages",
    "request",
    "response",
    "speech",
    "tools",
    "transcript_forms",
    "transcriptions",
]
