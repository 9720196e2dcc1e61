"""Lines of batches: of input files and of results, the requests that they become, and the records of files and batches.

Records of files and batches, as they are stored on the disk.

Requests of batches, which go through the public app as those of clients do.

Lines of a batch's input file, in OpenAI's form: how they are checked, found again and read.

Lines of a batch's results, in the forms of OpenAI and Anthropic.
"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct
from starlette.types import ASGIApp, Message, Scope

from gateway.access.caller import Caller
from gateway.errors import ApiError
from gateway.request.record import BATCH_CALLER

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
# How a line ended. Only lines that succeeded are in the output file.
Outcome = Literal["succeeded", "errored", "canceled", "expired"]
Purpose = Literal["batch", "batch_output"]

# Files without an expiry of their own, and batches that have ended, are deleted after this time.
RECORD_AGE_S: Final = 30 * 86400.0
ENDED: Final = frozenset[Status]({"failed", "completed", "expired", "cancelled"})
FILE_PREFIX: Final = "file-"
OPENAI_PREFIX: Final = "batch_"
ANTHROPIC_PREFIX: Final = "msgbatch_"
PREFIXES: Final = (FILE_PREFIX, OPENAI_PREFIX, ANTHROPIC_PREFIX)


class StoredFile(Struct, frozen=True, kw_only=True):
    """One file. Only `tenant` may read it. Times are Unix times."""

    id: str
    tenant: str
    purpose: Purpose
    filename: str
    size_bytes: int
    created: float
    # None means after the configured age.
    expires: float | None = None


class LineProblem(Struct, frozen=True):
    """Reason for which a line of the input file, or the whole file, cannot be run. Lines are counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchTokens(Struct, frozen=True):
    """Tokens of all answers of a batch."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


class StoredBatch(Struct, frozen=True, kw_only=True):
    """One batch. Only `tenant` may read it. Times are Unix times.

    `key` is the name of the key that made it. `is_everybodys` means that it was made without a key, while there were
    no keys. `reached` are the times at which the batch reached its statuses.
    """

    id: str
    tenant: str
    key: str | None
    is_everybodys: bool
    endpoint: str
    created: float
    expires: float
    status: Status
    input_file: str = ""
    output_file: str = ""
    error_file: str = ""
    metadata: dict[str, str] | None = None
    # Age at which the output files are deleted; None means the configured age.
    output_age_s: int | None = None
    total: int = 0
    # Numbers of lines by outcome. While the batch runs, `RunningBatch` has the current ones.
    counts: Mapping[str, int] = {}
    # The only model of all lines; None if there are several.
    model: str | None = None
    tokens: BatchTokens | None = None
    problems: tuple[LineProblem, ...] = ()
    reached: Mapping[str, float] = {}

    @property
    def is_anthropic(self) -> bool:
        return self.id.startswith(ANTHROPIC_PREFIX)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def new_name(prefix: str) -> str:
    """Return a new id of a file or batch."""
    return prefix + secrets.token_hex(12)


# Statuses of requests that may succeed later, if the answer also says when.
_RETRIED: Final = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class InnerAnswer:
    """Answer to an inner request."""

    status: int
    request_id: str
    retry_after_s: float
    body: bytes

    @property
    def is_refusal(self) -> bool:
        """Whether the request may succeed later."""
        return self.status in _RETRIED and self.retry_after_s > 0


class InnerRequest:
    """One request. Cancelling its task aborts the generation.

    Instead of a caller, `sender` may be an error, with which the app then answers.
    """

    def __init__(self, sender: Caller | ApiError, path: str, body: bytes, request_id: str) -> None:
        self._body = body
        self._request_id = request_id
        self._is_read = False
        self._status = 0
        self._retry_after_s = 0.0
        self._answer = bytearray()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        self._scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            BATCH_CALLER: sender,
        }

    async def answered_by(self, app: ASGIApp) -> InnerAnswer:
        """Send the request to the app and return the whole answer."""
        await app(self._scope, self._receive, self._send)
        return InnerAnswer(self._status, self._request_id, self._retry_after_s, bytes(self._answer))

    async def _receive(self) -> Message:
        if self._is_read:
            # A batch never leaves; its task is cancelled instead.
            await asyncio.get_running_loop().create_future()
        self._is_read = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = dict(message.get("headers", ()))
            self._retry_after_s = float(headers.get(b"retry-after", b"0"))
        else:
            self._answer += message.get("body", b"")


# Maximum lines of a batch, and characters of a line's id, as in OpenAI's API.
LINES_MAX: Final = 50_000
CUSTOM_ID_CHARS_MAX: Final = 512
# Only the first problems of a file are reported.
PROBLEMS_MAX: Final = 100
METHOD: Final = "POST"


class InputLine(Struct, frozen=True):
    """One request. `url` is the path of its endpoint."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _LineFields(Struct, frozen=True):
    """Fields of a body that matter here. The endpoint reports what is wrong with them, but for `stream`."""

    model: object = ""
    stream: object = None
    background: object = None


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Place of a line in the input file, and the model that it names."""

    custom_id: str
    offset: int
    size: int
    model: str


@dataclass(frozen=True, slots=True)
class ScannedInput:
    """Lines of an input file, or the problems for which the batch fails."""

    lines: list[LinePlace]
    problems: list[LineProblem]

    @property
    def model(self) -> str | None:
        """The model that all lines name; None if they name several."""
        models = {line.model for line in self.lines}
        return models.pop() if len(models) == 1 else None


_line = msgspec.json.Decoder(InputLine)
_fields = msgspec.json.Decoder(_LineFields)


def scan(path: Path, endpoint: str, line_bytes_max: int, lines_max: int = LINES_MAX) -> ScannedInput:
    """Check all lines of a file. May run in any thread. Raises `OSError`."""
    lines, problems, seen = list[LinePlace](), list[LineProblem](), set[str]()
    for number, (offset, text) in enumerate(_texts(path, line_bytes_max), 1):
        if not text.strip():
            continue
        if len(lines) >= lines_max:
            problems.append(LineProblem("too_many_tasks", f"The batch has more than {lines_max} requests."))
            break
        checked = _check(text, number, endpoint, seen, line_bytes_max)
        if isinstance(checked, LineProblem):
            problems.append(checked)
            if len(problems) >= PROBLEMS_MAX:
                break
        else:
            seen.add(checked.custom_id)
            lines.append(LinePlace(checked.custom_id, offset, len(text), model_of(checked)))
    if not lines and not problems:
        problems.append(LineProblem("empty_file", "The input file has no requests."))
    return ScannedInput(lines, problems)


def read_line(path: Path, place: LinePlace) -> InputLine:
    """Read a line again. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(place.offset)
        return _line.decode(file.read(place.size))


def model_of(line: InputLine) -> str:
    """Return the model that a line names, or an empty text."""
    model = _fields_of(line).model
    return model if isinstance(model, str) else ""


def unsupported_field(line: InputLine) -> str:
    """Return the name of a field that asks for what a line of a batch cannot have, or an empty text."""
    fields = _fields_of(line)
    if fields.stream is True:
        return "stream"
    return "background" if fields.background is True else ""


def _fields_of(line: InputLine) -> _LineFields:
    try:
        return _fields.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _LineFields()  # The endpoint refuses the body.


def _texts(path: Path, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the text of each line. A line that is too long is cut, and ends the file."""
    offset = 0
    with path.open("rb") as file:
        while text := file.readline(line_bytes_max + 1):
            yield offset, text
            if len(text) > line_bytes_max:
                return
            offset += len(text)


def _check(text: bytes, number: int, endpoint: str, seen: set[str], line_bytes_max: int) -> InputLine | LineProblem:
    if len(text) > line_bytes_max:
        return LineProblem("line_too_long", f"The line is longer than {line_bytes_max} bytes.", number)
    try:
        line = _line.decode(text)
    except msgspec.ValidationError as error:
        what = str(error).replace("`", "'")
        code = "missing_required_parameter" if "missing required field" in what else "invalid_request"
        return LineProblem(code, f"The line is no request: {what}.", number, _param(str(error)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineProblem("invalid_json_line", "This line is not parseable as valid JSON.", number)
    if not 1 <= len(line.custom_id) <= CUSTOM_ID_CHARS_MAX:
        message = f"'custom_id' must have 1 to {CUSTOM_ID_CHARS_MAX} characters."
        return LineProblem("invalid_custom_id", message, number, "custom_id")
    if line.custom_id in seen:
        message = f"The custom_id {line.custom_id[:100]!r} is used by another line."
        return LineProblem("duplicate_custom_id", message, number, "custom_id")
    if line.method != METHOD:
        return LineProblem("invalid_method", "'method' must be POST.", number, "method")
    if line.url != endpoint:
        message = f"The url {line.url[:100]!r} does not match the batch's endpoint {endpoint!r}."
        return LineProblem("mismatched_url", message, number, "url")
    return line


def _param(text: str) -> str | None:
    """Return the field of which msgspec's message tells."""
    if "required field `" in text:
        return text.partition("required field `")[2].rstrip("`")
    return text.partition("`$.")[2].rstrip("`") or None


_OK: Final = 200
_REQUEST_PREFIX: Final = "batch_req_"
_UNSERVED: Final[Mapping[Outcome, tuple[str, str]]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "canceled": ("batch_cancelled", "This request was not executed, because its batch was cancelled."),
}


class LineAnswer(Struct, frozen=True):
    """HTTP answer to a line."""

    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, frozen=True):
    """Reason for which a line was not run."""

    code: str
    message: str


class LineResult(Struct, frozen=True):
    """OpenAI's form of a result."""

    id: str
    custom_id: str
    response: LineAnswer | None
    error: LineError | None


class SucceededResult(Struct, frozen=True, tag_field="type", tag="succeeded"):
    message: Raw


class ErroredResult(Struct, frozen=True, tag_field="type", tag="errored"):
    error: Raw


class CanceledResult(Struct, frozen=True, tag_field="type", tag="canceled"):
    pass


class ExpiredResult(Struct, frozen=True, tag_field="type", tag="expired"):
    pass


MessageResult = SucceededResult | ErroredResult | CanceledResult | ExpiredResult


class MessageBatchResult(Struct, frozen=True):
    """Anthropic's form of a result."""

    custom_id: str
    result: MessageResult


class _Kind(Struct, frozen=True):
    type: Outcome = "succeeded"


class _Code(Struct, frozen=True):
    code: str = ""


class _InputDetails(Struct, frozen=True):
    cached_tokens: int = 0


class _OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class _Usage(Struct, frozen=True):
    """Usage in the forms of all endpoints."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _AnswerBody(Struct, frozen=True):
    usage: _Usage | None = None


class _Response(Struct, frozen=True):
    status_code: int
    body: _AnswerBody


class WrittenResult(Struct, frozen=True):
    """Facts of a result that was written, in any form."""

    custom_id: str
    response: _Response | None = None
    error: _Code | None = None
    result: _Kind | None = None

    @property
    def outcome(self) -> Outcome:
        if self.result is not None:
            return self.result.type
        if self.response is not None:
            return "succeeded" if self.response.status_code == _OK else "errored"
        codes: dict[str, Outcome] = {code: outcome for outcome, (code, _) in _UNSERVED.items()}
        return codes.get(self.error.code if self.error is not None else "", "errored")

    def add_to(self, tokens: BatchTokens) -> BatchTokens:
        """Return the tokens with those of this result."""
        usage = self.response.body.usage if self.response is not None else None
        if usage is None:
            return tokens
        inputs = usage.input_tokens_details or usage.prompt_tokens_details or _InputDetails()
        outputs = usage.output_tokens_details or usage.completion_tokens_details or _OutputDetails()
        return BatchTokens(
            tokens.prompt + usage.prompt_tokens + usage.input_tokens,
            tokens.cached + inputs.cached_tokens,
            tokens.completion + usage.completion_tokens + usage.output_tokens,
            tokens.reasoning + outputs.reasoning_tokens,
        )


_encode = msgspec.json.Encoder().encode
_written = msgspec.json.Decoder(WrittenResult)


def read_result(line: bytes) -> WrittenResult:
    """Read a written line. Raises `msgspec.DecodeError` if it was not written completely."""
    return _written.decode(line)


def served_line(custom_id: str, answer: InnerAnswer, is_anthropic: bool) -> tuple[Outcome, bytes]:
    """Return the outcome and the result of a line that was answered."""
    outcome: Literal["succeeded", "errored"] = "succeeded" if answer.status == _OK else "errored"
    body = Raw(answer.body)
    if not is_anthropic:
        response = LineAnswer(answer.status, answer.request_id, body)
        return outcome, _written_line(LineResult(new_name(_REQUEST_PREFIX), custom_id, response, None))
    result = SucceededResult(body) if outcome == "succeeded" else ErroredResult(body)
    return outcome, _written_line(MessageBatchResult(custom_id, result))


def unserved_line(custom_id: str, outcome: Outcome, is_anthropic: bool) -> bytes:
    """Return the result of a line that was not run, because its batch was cancelled or has expired."""
    if is_anthropic:
        return _written_line(
            MessageBatchResult(custom_id, CanceledResult() if outcome == "canceled" else ExpiredResult())
        )
    error = LineError(*_UNSERVED[outcome])
    return _written_line(LineResult(new_name(_REQUEST_PREFIX), custom_id, None, error))


def _written_line(result: Struct) -> bytes:
    return _encode(result) + b"\n"
