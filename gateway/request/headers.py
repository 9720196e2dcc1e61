"""Headers of an answer that name parts of the request which were ignored or not followed exactly."""

from collections.abc import Sequence
from typing import Final

from gateway.request.record import Header

IGNORED: Final = b"x-mlxd-ignored"
IGNORED_NAMES_MAX: Final = 20
IGNORED_NAME_CHARS: Final = 40


def ignored_header(names: Sequence[str]) -> list[Header]:
    """Return the header `x-mlxd-ignored`, which lists fields of the request that have no effect."""
    return _names_header(IGNORED, names)


def with_ignored(headers: Sequence[Header], names: Sequence[str]) -> list[Header]:
    """Return headers whose `x-mlxd-ignored` lists these names too."""
    values = [value for name, value in (*headers, *ignored_header(names)) if name == IGNORED]
    others = [header for header in headers if header[0] != IGNORED]
    return [*others, (IGNORED, b", ".join(values))] if values else others


def relaxed_header(names: Sequence[str]) -> list[Header]:
    """Return the header `x-mlxd-relaxed`, which lists how the answer deviates from the request.

    It names keywords of a schema that were not enforced, a video shown as images, and approximations of the model, such
    as `kv-bits-8` or a sparse prefill.
    """
    return _names_header(b"x-mlxd-relaxed", names)


def truncated_header(left_out: tuple[int, int]) -> list[Header]:
    """Return the header `x-mlxd-truncated`: how many turns and tokens were left out of a prompt that was too long."""
    turns, tokens = left_out
    return [(b"x-mlxd-truncated", f"{turns};{tokens}".encode())] if tokens else []


def served_by_header(upstream: str) -> list[Header]:
    """Return the header `x-mlxd-served-by`, which names the upstream that serves the request, if one does."""
    return [(b"x-mlxd-served-by", _header_safe(upstream).encode())] if upstream else []


def _names_header(header: bytes, names: Sequence[str]) -> list[Header]:
    """Return a header with these names. Its length is limited and unsafe characters are replaced."""
    if not names:
        return []
    shown = [_header_safe(name) for name in names[:IGNORED_NAMES_MAX]]
    if len(names) > IGNORED_NAMES_MAX:
        shown.append(f"+{len(names) - IGNORED_NAMES_MAX}")
    return [(header, ", ".join(shown).encode())]


def _header_safe(name: str) -> str:
    cut = name[:IGNORED_NAME_CHARS]
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-[]") else "_" for c in cut) or "_"
