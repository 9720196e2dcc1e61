"""Uploads: a form with a file, which goes to the disk as it arrives."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Final, Self

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from gateway.api.batches.batch_store import BatchStore
from gateway.errors import ApiError, BadRequest, BodyTooLarge
from gateway.http.multipart import ROOM_BYTES, FormParser, MultipartForm
from gateway.http.request_body import BODY_TIMEOUT_S
from gateway.request.record import ClientLeft, RequestRecord

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
