"""Pages of files and batches, and files as bodies of answers."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from starlette.datastructures import QueryParams
from starlette.types import Scope, Send

from gateway.api.batches.records import StoredBatch, StoredFile
from gateway.errors import BadRequest
from gateway.http.exchange import SLICE_BYTES
from gateway.request.record import Header

T = TypeVar("T", StoredFile, StoredBatch)
Content = TypeVar("Content")

DEFAULT_LIMIT: Final = 20
JSON_LINES: Final = b"application/x-jsonl"
BINARY: Final = b"application/octet-stream"


def path_id(scope: Scope) -> str:
    name = scope["path_params"]["id"]
    assert isinstance(name, str)
    return name


def limit_of(query: QueryParams, default: int, most: int) -> int:
    """Return the number of items in a page. Raises `BadRequest`."""
    given = query.get("limit", str(default))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) <= len(str(most)) else 0
    if not 1 <= limit <= most:
        raise BadRequest(f"Invalid value for 'limit': expected 1 to {most}.", "limit", "invalid_value")
    return limit


def page_after(items: Sequence[T], after: str | None, limit: int) -> tuple[Sequence[T], bool]:
    """Return the items after the one with the id `after`, and whether there are more. Raises `BadRequest`."""
    start = 0 if after is None else _place(items, after, "after") + 1
    return items[start : start + limit], start + limit < len(items)


def page_before(items: Sequence[T], before: str, limit: int) -> tuple[Sequence[T], bool]:
    """Return the items right before the one with the id `before`, and whether there are more before them."""
    end = _place(items, before, "before_id")
    return items[max(0, end - limit) : end], end > limit


def _place(items: Sequence[T], name: str, param: str) -> int:
    for at, item in enumerate(items):
        if item.id == name:
            return at
    raise BadRequest(f"There is no item {name[:100]!r} here.", param, "invalid_value")


async def send_content(
    send: Send, sizes: Sequence[tuple[Content, int]], read: Callable[[Content, int, int], Awaitable[bytes]], kind: bytes
) -> None:
    """Send whole contents, one after the other, in slices that are read as the client takes them."""
    total = sum(size for _, size in sizes)
    headers: list[Header] = [(b"content-type", kind), (b"content-length", str(total).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for item, size in sizes:
        for at in range(0, size, SLICE_BYTES):
            data = await read(item, at, min(SLICE_BYTES, size - at))
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
