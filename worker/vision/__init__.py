"""Images, video and audio: from the bytes of a request to features beside a prompt's text."""

__all__ = ["markers", "media", "positions", "processor"]
