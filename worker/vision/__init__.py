"""Images, video and audio: from the bytes of a request to features beside a prompt's text."""

__all__ = [
    "attach",
    "checkpoint",
    "encoded",
    "encoder",
    "features",
    "graft",
    "images",
    "markers",
    "media",
    "positions",
    "processor",
    "samples",
    "sounds",
    "text_model",
    "unserved",
]
