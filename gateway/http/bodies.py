"""Bodies of requests and answers: reading within limits, forms with files, whole answers, and stored answers.

Parts of HTTP that all endpoints share: reading a body within a limit, and sending one whole answer.

Reading of request bodies, with a size limit, a time limit, and a reservation of their memory.

Parser of `multipart/form-data` (RFC 7578). It returns plain fields, and one file as bytes.

Stored answers that many clients may read concurrently. There is one copy of each, in the memory for bodies.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ApiError, BadRequest, BodyTooLarge
from gateway.request.body_memory import LARGE_BYTES, Bodies, BodyLease
from gateway.request.record import ClientLeft, Dialect, Header, RequestRecord, record_of

JSON: Final = b"application/json"
# Browsers do not treat an answer with this header as a page, whatever text it quotes.
_NO_SNIFF: Final[Header] = (b"x-content-type-options", b"nosniff")
# The transport buffers whatever the client has not read, so a large answer is sent in slices of this size.
SLICE_BYTES: Final = 64 * 1024
# nginx uses this status if a client leaves before it gets its answer.
CLIENT_CLOSED: Final = 499


class ResponseSender:
    """Wrapper of `send` that adds the middleware's headers and records the status."""

    __slots__ = ("_record", "inner", "is_started")

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self.inner = send
        self._record = record
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            record = self._record
            record.status = message["status"]
            headers: list[Header] = [*message.get("headers", []), *record.always]
            if record.late_headers is not None:
                headers += record.late_headers()
            headers += (_NO_SNIFF, (b"x-request-id", record.id.encode()))
            if record.dialect is Dialect.ANTHROPIC:
                headers.append((b"request-id", record.id.encode()))
            message["headers"] = headers
        await self.inner(message)


def came_to(scope: Scope, port: int) -> bool:
    """Whether a request arrived at this port of the daemon; False for port 0."""
    server = scope.get("server")
    return bool(port) and server is not None and server[1] == port


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response. Only for endpoints that return responses; ASGI endpoints use `send_body`."""
    return Response(msgspec.json.encode(value), status, media_type=JSON.decode())


async def send_body(
    send: Send, status: int, body: bytes, headers: list[Header] | None = None, kind: bytes = JSON
) -> None:
    """Send one whole answer."""
    await send_parts(send, status, [memoryview(body)], headers, kind)


async def send_parts(
    send: Send,
    status: int,
    parts: Sequence[memoryview],
    headers: list[Header] | None = None,
    kind: bytes = JSON,
) -> None:
    """Send one whole answer that is not in one place in memory."""
    size = sum(map(len, parts))
    sent: list[Header] = [(b"content-type", kind), (b"content-length", str(size).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    slices = [part[at : at + SLICE_BYTES] for part in parts for at in range(0, len(part), SLICE_BYTES)]
    for piece in slices[:-1]:
        await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
    await send({"type": "http.response.body", "body": bytes(slices[-1]) if slices else b"", "more_body": False})


BODY_TIMEOUT_S: Final = 120.0
# Memory is reserved in advance for at most this much of an announced body. Small bodies are reserved completely.
ADVANCE_RESERVE_BYTES: Final = LARGE_BYTES
_LENGTH_DIGITS: Final = 18


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read the whole body. Its first `ADVANCE_RESERVE_BYTES` are reserved in advance, and the rest as it arrives.

    Raises `BodyTooLarge` as soon as the size is known to exceed the limit, `ClientLeft`, `ApiError` 408, `RateLimited`
    or `Unavailable`.
    """
    record = record_of(scope)
    length = Headers(scope=scope).get("content-length", "")
    announced = 0
    if length.isdigit():
        # The number of digits is checked, because Python refuses to parse a number of thousands of digits.
        if len(length) > _LENGTH_DIGITS or int(length) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        announced = int(length)
        await reserve(record, min(announced, ADVANCE_RESERVE_BYTES))
    meter = record.caller.meter
    with nullcontext() if meter is None else meter.receiving():
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _receive_all(record, receive, limit_bytes, announced)
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
    record.body_bytes = len(body)
    if Headers(scope=scope).get("content-encoding", "identity") != "identity":
        raise BadRequest("Compressed request bodies are not supported.")
    # Some Windows tools write a byte order mark before JSON.
    return body.removeprefix(b"\xef\xbb\xbf")


async def _receive_all(record: RequestRecord, receive: Receive, limit_bytes: int, announced: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        if record.lease is not None and size > record.lease.size_bytes:
            await reserve(record, max(size, min(announced, size + ADVANCE_RESERVE_BYTES)))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def reserve(record: RequestRecord, size_bytes: int) -> None:
    """Increase the memory reserved for a request's body to this size. Raises `Unavailable` or `BodyTooLarge`."""
    if record.lease is not None:
        record.lease.owner = record.caller.key or ""
        await record.lease.reach(size_bytes)


FORM: Final = b"multipart/form-data"
PARTS_MAX: Final = 64
FIELD_BYTES_MAX: Final = 256 * 1024
# Maximum size of the body without the file: the other fields, and the bytes between parts.
ROOM_BYTES: Final = 1024 * 1024
_HEADERS_MAX: Final = 8
_HEADER_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """Fields in the order of their parts; a name may occur several times. `file` is None if the form has no file."""

    fields: tuple[tuple[str, str], ...]
    file: bytes | None
    filename: str = ""


def read_form(body: bytes, content_type: str, file_field: str) -> MultipartForm:
    """Parse a body. `file_field` is the name of the field that has the file. Raises `BadRequest`."""
    reader = FormParser(content_type, file_field)
    reader.feed(body)
    return reader.end()


class FormParser:
    """Parser of a body that arrives in pieces. Methods raise `BadRequest`."""

    def __init__(self, content_type: str, file_field: str, on_file: Callable[[bytes], None] | None = None) -> None:
        """`on_file` is called with each piece of the file, which is then not part of the form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != FORM or not boundary:
            raise BadRequest("The body must be multipart/form-data with a boundary.", code="invalid_content_type")
        self._parts = reader = _Reader(file_field, on_file)
        with _translated():
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": reader.begin,
                    "on_header_field": reader.name_header,
                    "on_header_value": reader.value_header,
                    "on_header_end": reader.end_header,
                    "on_headers_finished": reader.headed,
                    "on_part_data": reader.receive,
                    "on_part_end": reader.end,
                    "on_end": reader.close,
                },
                max_header_count=_HEADERS_MAX,
                max_header_size=_HEADER_BYTES_MAX,
            )

    def feed(self, data: bytes) -> None:
        """Parse the next piece of the body."""
        with _translated():
            self._parser.write(data)

    def end(self) -> MultipartForm:
        """Return the form of a body that has arrived."""
        reader = self._parts
        with _translated():
            self._parser.finalize()
        if not reader.is_whole:
            raise BadRequest("The form cannot be read: it has no end.", code="invalid_form")
        return MultipartForm(tuple(reader.fields), reader.file, reader.filename)


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except FormParserError as error:
        raise BadRequest(f"The form cannot be read: {error}.", code="invalid_form") from None


class _Reader:
    """State of the parser: the current part and the completed parts."""

    def __init__(self, file_field: str, on_file: Callable[[bytes], None] | None) -> None:
        self.fields: list[tuple[str, str]] = []
        self.file: bytes | None = None
        self.filename = ""
        self._on_file = on_file
        self.is_whole = False
        self._file_field = file_field
        self._parts = 0
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._pieces: list[bytes] = []
        self._size = 0

    def begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise BadRequest(f"The form has more than {PARTS_MAX} parts.", code="invalid_form")
        self._disposition, self._name, self._pieces, self._size = b"", "", [], 0

    def name_header(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], self._header[1])

    def value_header(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = (b"", b"")

    def headed(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        if not name:
            raise BadRequest("A part of the form has no name.", code="invalid_form")
        self._name = name.decode("utf-8", errors="replace")
        self._is_file = self._name == self._file_field
        if self._is_file and self.file is not None:
            raise BadRequest(f"The form has more than one '{self._name}'.", self._name, "invalid_value")
        if self._is_file:
            self.filename = options.get(b"filename", b"").decode("utf-8", errors="replace")

    def receive(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if not self._is_file and self._size > FIELD_BYTES_MAX:
            message = f"'{self._name[:100]}' is larger than {FIELD_BYTES_MAX} bytes."
            raise BadRequest(message, self._name[:100], "invalid_value")
        if self._is_file and self._on_file is not None:
            self._on_file(data[start:end])
        else:
            self._pieces.append(data[start:end])

    def end(self) -> None:
        value = b"".join(self._pieces)
        self._pieces = []
        if self._is_file:
            self.file = value
            return
        try:
            self.fields.append((self._name, value.decode("utf-8")))
        except UnicodeDecodeError:
            message = f"'{self._name[:100]}' is not valid UTF-8."
            raise BadRequest(message, self._name[:100], "invalid_value") from None

    def close(self) -> None:
        self.is_whole = True


# A reader has one slice, and two more are buffered by its transport, whose high-water mark is one slice.
READER_BYTES: Final = 3 * SLICE_BYTES


@dataclass(slots=True)
class _SharedAnswer:
    """One answer. Its first reader makes it."""

    lease: BodyLease
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    readers: int = 0
    body: bytes | None = None
    failure: ApiError | None = None


class SharedAnswers:
    """Registry of the answers that are being read.

    An answer is made once for all its readers, and its memory is leased while it has any reader. Each reader leases
    memory for its slices with its request, so the memory for bodies and the quota of the reader's key bound the number
    of readers. Used on the event loop only.
    """

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._answers: dict[Hashable, _SharedAnswer] = {}

    @asynccontextmanager
    async def reading(
        self, record: RequestRecord, key: Hashable, size_bytes: int, make: Callable[[], Awaitable[bytes]]
    ) -> AsyncGenerator[bytes]:
        """Yield the answer with this key, which takes about `size_bytes`. Answers with equal keys must have equal
        bytes.

        Raises `Unavailable` if there is no memory, and any error of `make`.
        """
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _SharedAnswer(self._bodies.lease())
            answer.lease.owner = record.caller.key or ""
        answer.readers += 1
        try:
            body = await self._body(answer, size_bytes, make)
            await reserve(record, min(len(body), READER_BYTES))
            yield body
        finally:
            answer.readers -= 1
            if not answer.readers:
                del self._answers[key]
                answer.lease.close()

    async def _body(self, answer: _SharedAnswer, size_bytes: int, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the answer, which the first reader makes. If that reader's client leaves meanwhile, the next reader
        makes it.

        If making it fails, all waiting readers get the same error.
        """
        async with answer.lock:
            if answer.failure is not None:
                raise answer.failure
            if answer.body is None:
                try:
                    await self._reach(answer.lease, size_bytes)
                    answer.body = await make()
                    await self._reach(answer.lease, len(answer.body))
                except ApiError as error:
                    answer.body, answer.failure = None, error
                    raise
            return answer.body

    async def _reach(self, lease: BodyLease, size_bytes: int) -> None:
        # An answer may be larger than all memory for bodies, because it includes more than its request. It is sent
        # nevertheless.
        await lease.reach(min(size_bytes, self._bodies.largest_bytes()))
