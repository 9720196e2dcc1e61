"""Headers of an answer that name ignored and relaxed parts of the request."""

from collections.abc import Sequence
from typing import Final

from gateway.request.record import Header

IGNORED_NAMES_MAX: Final = 20
IGNORED_NAME_CHARS: Final = 40


def ignored_header(names: Sequence[str]) -> list[Header]:
    """Return the header `x-mlxd-ignored`: fields of the request without effect."""
    return _names_header(b"x-mlxd-ignored", names)


def relaxed_header(names: Sequence[str]) -> list[Header]:
    """Return the header `x-mlxd-relaxed`: deviations from the request.

    These are keywords of a schema that were not enforced, a video shown as images, and approximations of the model,
    such as `kv-bits-8` or a sparse prefill.
    """
    return _names_header(b"x-mlxd-relaxed", names)


def truncated_header(left_out: tuple[int, int]) -> list[Header]:
    """Return the header `x-mlxd-truncated`: turns and tokens that were left out of a prompt that was too long."""
    turns, tokens = left_out
    return [(b"x-mlxd-truncated", f"{turns};{tokens}".encode())] if tokens else []


def served_by_header(peer: str) -> list[Header]:
    """Return the header `x-mlxd-served-by`: the peer that serves the request, if it is not this daemon."""
    return [(b"x-mlxd-served-by", _header_safe(peer).encode())] if peer else []


def _names_header(header: bytes, names: Sequence[str]) -> list[Header]:
    """Return a header of limited length, with unsafe characters replaced."""
    if not names:
        return []
    shown = [_header_safe(name) for name in names[:IGNORED_NAMES_MAX]]
    if len(names) > IGNORED_NAMES_MAX:
        shown.append(f"+{len(names) - IGNORED_NAMES_MAX}")
    return [(header, ", ".join(shown).encode())]


def _header_safe(name: str) -> str:
    cut = name[:IGNORED_NAME_CHARS]
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "_" for c in cut) or "_"
