"""`/v1/files`: upload, list, retrieve and delete files of batches, and read their content.

Pages of files and batches, and files as bodies of answers.

Uploads: a form with a file, which goes to the disk as it arrives.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Final, Self, TypeVar

import msgspec
from msgspec import Meta, Struct, field
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from gateway.api.batches.batch_lines import FILE_PREFIX, RECORD_AGE_S, StoredBatch, StoredFile, new_name
from gateway.api.batches.batch_store import BatchStore
from gateway.api.common.decode import converted
from gateway.api.common.request_fields import shape, words
from gateway.errors import ApiError, BadRequest, BodyTooLarge, invalid_choice, missing_parameter
from gateway.http.bodies import BODY_TIMEOUT_S, ROOM_BYTES, SLICE_BYTES, FormParser, MultipartForm, send_body
from gateway.request.record import ClientLeft, Header, RequestRecord, ignored_header, record_of

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


# Maximum size of a file, as in OpenAI's API.
FILE_BYTES_MAX: Final = 200 * 1024 * 1024
FIELD: Final = "file"
_BUFFER_BYTES: Final = 256 * 1024


class UploadedContent:
    """Context of content that is being written. What is not taken is deleted at the end."""

    path: Path

    def __init__(self, store: BatchStore, tenant: str, limit_bytes: int = FILE_BYTES_MAX) -> None:
        self._store = store
        self._tenant = tenant
        self._limit_bytes = limit_bytes
        self._file: int | None = None
        self._buffer = bytearray()
        self._is_taken = False
        self.size_bytes = 0

    async def __aenter__(self) -> Self:
        self.path, self._file = await self._store.run(self._store.folder.open_upload)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._store.forget(self.path.name)
        if not self._is_taken:
            # This is not awaited, because the request may have been cancelled.
            self._store.submit(self._discard)

    def add(self, data: bytes) -> None:
        """Take a piece. Raises `BodyTooLarge`."""
        self._buffer += data
        self.size_bytes += len(data)
        if self.size_bytes > self._limit_bytes:
            raise BodyTooLarge(self._limit_bytes)

    async def flush(self, least_bytes: int = _BUFFER_BYTES) -> None:
        """Write what was taken, if it is at least so much. Raises `ApiError`."""
        if self._file is not None and self._buffer and len(self._buffer) >= least_bytes:
            self._store.check_room(self._tenant, len(self._buffer))
            data, file, self._buffer = bytes(self._buffer), self._file, bytearray()
            self._store.grow(self.path.name, len(data))
            await self._store.run(lambda: self._store.folder.append(file, data))

    async def close(self) -> None:
        """Write all content, which then survives a power cut. Raises `ApiError`."""
        await self.flush(0)
        file, self._file = self._file, None
        assert file is not None
        await self._store.run(lambda: self._store.folder.close_upload(file))

    def take(self) -> None:
        """Keep the content."""
        self._is_taken = True

    def _discard(self) -> None:
        if self._file is not None:
            self._store.folder.close_upload(self._file)
        self._store.folder.discard_upload(self.path)


async def receive_form(
    content: UploadedContent, store: BatchStore, record: RequestRecord, scope: Scope, receive: Receive
) -> MultipartForm:
    """Read a form, whose file goes to `content`. Raises `ApiError` and `ClientLeft`."""
    headers = Headers(scope=scope)
    if headers.get("content-encoding", "identity") != "identity":
        raise BadRequest("Compressed request bodies are not supported.")
    length = headers.get("content-length", "")
    if length.isdigit() and len(length) < 19:
        if int(length) > FILE_BYTES_MAX + ROOM_BYTES:
            raise BodyTooLarge(FILE_BYTES_MAX)
        store.check_room(record.caller.key or "", max(0, int(length) - ROOM_BYTES))
    form = FormParser(headers.get("content-type", ""), FIELD, content.add)
    meter = record.caller.meter
    size = 0
    with nullcontext() if meter is None else meter.receiving():
        more = True
        while more:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
            if message["type"] == "http.disconnect":
                raise ClientLeft
            data: bytes = message.get("body", b"")
            size += len(data)
            if size - content.size_bytes > 2 * ROOM_BYTES:
                raise BodyTooLarge(ROOM_BYTES)
            form.feed(data)
            await content.flush()
            more = message.get("more_body", False)
    record.body_bytes = size
    parsed = form.end()
    await content.close()
    return parsed


PAGE_MAX: Final = 10_000
PURPOSE: Final = "batch"
PURPOSES: Final = (PURPOSE, "batch_output")
ANCHOR: Final = "created_at"
EXPIRY_MIN_S: Final = 3600
EXPIRY_MAX_S: Final = 2_592_000
FILENAME_CHARS_MAX: Final = 255
ExpirySeconds = Annotated[int, Meta(ge=EXPIRY_MIN_S, le=EXPIRY_MAX_S)]
Anchor = Annotated[str, words(ANCHOR)]

_encode = msgspec.json.Encoder().encode


class FileUpload(Struct, frozen=True, kw_only=True):
    """`POST /v1/files`, as a form. The file's bytes are passed separately."""

    file: Annotated[str, shape({"contentMediaType": "application/octet-stream"})]
    purpose: Annotated[str, words(PURPOSE)]
    anchor: Anchor | None = field(default=None, name="expires_after[anchor]")
    seconds: ExpirySeconds | None = field(default=None, name="expires_after[seconds]")


class FileObject(Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


class FileList(Struct, frozen=True, tag_field="object", tag="list"):
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, frozen=True, tag_field="object", tag="file"):
    id: str
    deleted: bool = True


class FileEndpoints:
    """Endpoints of files. Each is an ASGI handler."""

    def __init__(
        self,
        store: BatchStore,
        on_upload: Callable[[], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._on_upload = on_upload
        self._wall = wall

    async def upload_or_list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `POST` and `GET` of `/v1/files`."""
        if scope["method"] == "POST":
            await self._upload(scope, receive, send)
        else:
            await self._list(scope, send)

    async def get_or_delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET` and `DELETE` of `/v1/files/{id}`."""
        file = self._store.file(record_of(scope).caller.owner, path_id(scope))
        if scope["method"] == "DELETE":
            await self._store.delete(file.id)
            await send_body(send, 200, _encode(DeletedFile(file.id)))
        else:
            await send_body(send, 200, _encode(self._view(file)))

    async def content(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle `GET /v1/files/{id}/content`."""
        file = self._store.file(record_of(scope).caller.owner, path_id(scope))
        await send_content(send, [(file, file.size_bytes)], self._store.read, BINARY)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        tenant = record.caller.owner
        self._store.check_on()
        self._store.check_room(tenant, 0)
        async with UploadedContent(self._store, tenant) as content:
            form = await receive_form(content, self._store, record, scope, receive)
            request, unknown = _request(form)
            now = self._wall()
            file = StoredFile(
                id=new_name(FILE_PREFIX),
                tenant=tenant,
                purpose="batch",
                filename=form.filename[:FILENAME_CHARS_MAX] or FIELD,
                size_bytes=content.size_bytes,
                created=now,
                expires=None if request.seconds is None else now + request.seconds,
            )
            await self._store.add_upload(content.path, content.size_bytes, file)
            content.take()
        self._on_upload()
        await send_body(send, 200, _encode(self._view(file)), ignored_header(unknown))

    async def _list(self, scope: Scope, send: Send) -> None:
        query = QueryParams(scope["query_string"])
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise invalid_choice(order, ("asc", "desc"), "order")
        tenant = record_of(scope).caller.owner
        own = [file for file in self._store.files.values() if file.tenant == tenant and purpose in (None, file.purpose)]
        page, has_more = page_after(
            own if order == "asc" else own[::-1], query.get("after"), limit_of(query, PAGE_MAX, PAGE_MAX)
        )
        ids = [file.id for file in page] or [None]
        await send_body(send, 200, _encode(FileList(list(map(self._view, page)), ids[0], ids[-1], has_more)))

    def _view(self, file: StoredFile) -> FileObject:
        return FileObject(
            id=file.id,
            bytes=file.size_bytes,
            created_at=int(file.created),
            expires_at=int(file.expires or file.created + RECORD_AGE_S),
            filename=file.filename,
            purpose=file.purpose,
        )


def _request(form: MultipartForm) -> tuple[FileUpload, list[str]]:
    """Check the fields of a form. Returns the names of unknown fields too. Raises `BadRequest`."""
    names = set(FileUpload.__struct_encode_fields__)
    values: dict[str, Any] = {name: value for name, value in form.fields if name in names}
    if form.file is None:
        raise missing_parameter(FIELD)
    if "purpose" not in values:
        raise missing_parameter("purpose")
    request = converted(values | {FIELD: ""}, FileUpload, "", strict=False)
    if request.purpose != PURPOSE:
        raise invalid_choice(request.purpose, (PURPOSE,), "purpose")
    check_expiry(request.anchor, request.seconds, "expires_after")
    return request, [name for name, _ in form.fields if name not in names]


def check_expiry(anchor: str | None, seconds: int | None, name: str) -> None:
    """Raises `BadRequest` unless both are given, or neither."""
    if anchor not in (None, ANCHOR):
        raise invalid_choice(anchor, (ANCHOR,), f"{name}[anchor]")
    if (anchor is None) is not (seconds is None):
        missing = f"{name}[{'anchor' if anchor is None else 'seconds'}]"
        raise BadRequest(f"'{name}' needs 'anchor' and 'seconds'.", missing, "missing_required_parameter")
