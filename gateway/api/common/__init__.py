"""Parts of every dialect: decoding, constraints, reasoning, and the way of a generating request."""

__all__ = [
    "canonical",
    "constraints",
    "decode",
    "doc_hints",
    "drafts",
    "refused_fields",
    "serve",
    "structure",
    "thinking",
    "vectors",
]
