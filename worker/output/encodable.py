"""Text that a frame can carry."""


def encodable(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair, which UTF-8 has no form for.

    `json.loads` makes one of `"\\ud800"`, so names and messages that quote a client or a model may hold it.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()
