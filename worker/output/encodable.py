"""Text that UTF-8 can encode."""


def encodable(text: str) -> str:
    """Return `text` with a question mark for each lone surrogate, which UTF-8 cannot encode.

    `json.loads` returns a lone surrogate for `"\\ud800"`, so names and messages that quote a client or a model may
    contain some.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()
