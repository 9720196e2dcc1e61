"""Errors of a request as one tree, and their body in OpenAI's API.

    ApiError
    ├── BadRequest         400  the body is invalid
    │   └── Unsupported    400  a parameter is valid, but not supported here
    ├── Unauthorized       401  the key is missing or invalid
    ├── Forbidden          403
    ├── Misdirected        421  the `Host` header names another machine
    ├── ModelNotFound      404  the model is unknown, or the key may not use it
    ├── BodyTooLarge       413
    ├── RateLimited        429  the key's limit per minute or of concurrency is reached
    ├── BudgetSpent        429  the key's budget of the day or month is spent
    ├── Overloaded         429  the model's queue is full
    ├── Cancelled          499  the operator ended the request; SDKs do not retry this status
    ├── InternalError      500
    └── Unavailable        503  the model or the daemon cannot serve now

Errors have no dialect: each API has its own body for them. `TABLE` translates the failures of workers.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from protocol.codec import MAX_FRAME_BYTES, FrameTooLarge, Unsendable
from protocol.failures import Code, Failure

INVALID: Final = "invalid_request_error"
SERVER: Final = "server_error"
RATE: Final = "rate_limit_error"
OVERLOADED: Final = "service_unavailable_error"
LISTED_MODELS_MAX: Final = 50
# Retry-After if too many other requests run, or if a worker was lost.
BUSY_RETRY_AFTER_S: Final = 1.0
# Retry-After if requests fill the memory, or the threads, that all of them share.
FULL_RETRY_AFTER_S: Final = 2.0
# Retry-After while the daemon shuts down. Another one may start in this time.
DRAIN_RETRY_AFTER_S: Final = 5.0


class ApiError(Exception):
    """Error that is sent as an answer. `message` is for the client; `retry_after_s` becomes a Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
        numbers: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.numbers = numbers
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def outcome(self) -> str:
        """Outcome of the request as the logs name it."""
        return self.code or "error"


class BadRequest(ApiError):
    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class Unsupported(BadRequest):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param, "unsupported_parameter")


class UpgradeRequired(ApiError):
    """Answer to a WebSocket handshake on a path without WebSockets, or that is not valid. Codex falls back to
    server-sent events at once on this status alone.
    """

    def __init__(self) -> None:
        message = "No WebSocket can be opened here: send the request over HTTP/1.1."
        super().__init__(426, message, code="upgrade_required")


def missing_parameter(param: str) -> BadRequest:
    """Return the error of a request without a required parameter."""
    return BadRequest(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def invalid_choice(value: str, known: Iterable[str], param: str) -> BadRequest:
    """Return the error for a parameter whose value is not in `known`."""
    message = f"Invalid value for '{param}': {value[:40]!r} is none of {', '.join(known)}."
    return BadRequest(message, param, "invalid_value")


class InternalError(ApiError):
    """The request failed because of a bug in the server; the log has the traceback."""

    def __init__(self) -> None:
        super().__init__(500, "Internal error.", type=SERVER, code="internal")


class Unauthorized(ApiError):
    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(401, message, code=code)

    @property
    def outcome(self) -> str:
        return self.code or "missing_api_key"


class Forbidden(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(403, message, code="permission_denied")


class Misdirected(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(421, message, code="unknown_host")


class RateLimited(ApiError):
    """A rate limit is reached. `kind` is OpenAI's type of this error, `requests` or `tokens`."""

    def __init__(self, message: str, kind: str, retry_after_s: float) -> None:
        super().__init__(429, message, type=kind, code="rate_limit_exceeded", retry_after_s=retry_after_s)


class BudgetSpent(ApiError):
    """The key's daily or monthly budget is spent. OpenAI calls this error an insufficient quota."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        kind = "insufficient_quota"
        super().__init__(429, message, type=kind, code=kind, retry_after_s=retry_after_s)


class ModelNotFound(ApiError):
    def __init__(self, name: str, known: Iterable[str], what: str = "Models here") -> None:
        names = list(known)
        more = "" if len(names) <= LISTED_MODELS_MAX else f" and {len(names) - LISTED_MODELS_MAX} more"
        listed = ", ".join(names[:LISTED_MODELS_MAX]) + more
        super().__init__(
            404,
            f"The model {name[:200]!r} does not exist. {what}: {listed}.",
            param="model",
            code="model_not_found",
        )


class BodyTooLarge(ApiError):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(413, f"The request body is larger than {limit_bytes} bytes.", code="request_too_large")


class Overloaded(ApiError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(429, message, type=RATE, code="rate_limit_exceeded", retry_after_s=retry_after_s)


class Cancelled(ApiError):
    def __init__(self) -> None:
        super().__init__(499, "The operator cancelled this request.", type="request_cancelled", code="cancelled")


class Unavailable(ApiError):
    def __init__(self, message: str, retry_after_s: float = 0.0, code: str = "service_unavailable") -> None:
        super().__init__(503, message, type=OVERLOADED, code=code, retry_after_s=retry_after_s)


# -- failures of a worker --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HttpStatus:
    """HTTP answer for a failure code. `retry_after_s` is the minimum time before a client retries.

    A failure's message may include paths of the server; `public` replaces it for clients that are not admins.
    """

    status: int
    type: str
    code: str
    retry_after_s: float = 0.0
    public: str = ""


TABLE: Final[dict[Code, HttpStatus]] = {
    Code.INTERNAL: HttpStatus(500, SERVER, "internal_error", public="The server failed; its log says why."),
    Code.INVALID_REQUEST: HttpStatus(400, INVALID, "invalid_value"),
    Code.UNSUPPORTED: HttpStatus(400, INVALID, "unsupported_parameter"),
    Code.CONTEXT_LENGTH_EXCEEDED: HttpStatus(400, INVALID, "context_length_exceeded"),
    Code.TEMPLATE_ERROR: HttpStatus(400, INVALID, "template_error"),
    Code.BUSY: HttpStatus(429, RATE, "rate_limit_exceeded", BUSY_RETRY_AFTER_S),
    Code.DEADLINE_EXCEEDED: HttpStatus(504, SERVER, "deadline_exceeded"),
    Code.ABORTED: HttpStatus(503, OVERLOADED, "aborted", BUSY_RETRY_AFTER_S),
    Code.DRAINING: HttpStatus(503, OVERLOADED, "draining", DRAIN_RETRY_AFTER_S),
    Code.WORKER_DIED: HttpStatus(
        503, OVERLOADED, "worker_died", BUSY_RETRY_AFTER_S, "The model's worker was lost. Try again."
    ),
    Code.QUARANTINED: HttpStatus(400, INVALID, "quarantined"),
    Code.ROW_FAILED: HttpStatus(500, SERVER, "generation_failed"),
    Code.UNSUPPORTED_MODALITY: HttpStatus(400, INVALID, "unsupported_modality"),
    Code.INVALID_IMAGE: HttpStatus(400, INVALID, "invalid_image"),
    Code.IMAGE_TOO_LARGE: HttpStatus(400, INVALID, "image_too_large"),
    Code.INVALID_VIDEO: HttpStatus(400, INVALID, "invalid_video"),
    Code.INVALID_AUDIO: HttpStatus(400, INVALID, "invalid_audio"),
    Code.TOO_MANY_MEDIA: HttpStatus(400, INVALID, "too_many_media"),
    Code.MODEL_MISSING: HttpStatus(
        503, OVERLOADED, "model_missing", public="Files of the model are missing on the server; its log says which."
    ),
    Code.MODEL_CORRUPT: HttpStatus(
        503, OVERLOADED, "model_corrupt", public="The model's files cannot be loaded; the server's log says why."
    ),
    Code.MODEL_UNSUPPORTED: HttpStatus(
        503, OVERLOADED, "model_unsupported", public="The server cannot serve this model; its log says why."
    ),
    Code.OUT_OF_MEMORY: HttpStatus(
        503, OVERLOADED, "out_of_memory", 10.0, "The server is short of memory for this model."
    ),
    Code.LOAD_TIMEOUT: HttpStatus(503, OVERLOADED, "load_timeout", 10.0),
    Code.BAD_CONFIG: HttpStatus(
        503, OVERLOADED, "bad_config", public="The server's configuration of this model is not valid; its log says why."
    ),
    Code.INCOMPATIBLE: HttpStatus(
        503, OVERLOADED, "incompatible_worker", public="The model's worker is of another version than the server."
    ),
    Code.DOES_NOT_FIT: HttpStatus(503, OVERLOADED, "model_does_not_fit"),
}


def message_of(failure: Failure, is_operator: bool) -> str:
    """Return the failure's message for a client. A failure with a `param` is about the request itself."""
    public = TABLE[failure.code].public
    return failure.message if is_operator or failure.param is not None or not public else public


def from_failure(failure: Failure, retry_after_s: float = 0.0, *, is_operator: bool = False) -> ApiError:
    """Translate a worker's failure to an error. The failure's `detail` is only for the log."""
    answer = TABLE[failure.code]
    return ApiError(
        answer.status,
        message_of(failure, is_operator),
        type=answer.type,
        param=failure.param,
        code=answer.code,
        retry_after_s=max(answer.retry_after_s, retry_after_s),
        numbers=failure.numbers,
    )


def from_unsendable(error: Unsendable) -> ApiError:
    """Translate the error of a request that is too large for its worker, or contains a value that cannot be sent."""
    if isinstance(error, FrameTooLarge):
        message = f"The request is too large: with all of its choices, a worker takes {MAX_FRAME_BYTES} bytes."
        return ApiError(413, message, code="request_too_large")
    return BadRequest("The request holds a value that its worker cannot be sent.", code="invalid_value")


# -- OpenAI's shape --------------------------------------------------------------------------------------------------


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def openai_body(error: ApiError) -> bytes:
    """Encode an error as a JSON body. A stream sends the same JSON in an error event."""
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, error.type, error.param, error.code)))


def error_headers(error: ApiError) -> list[tuple[bytes, bytes]]:
    """Return the headers of an error: `www-authenticate` for a 401, the protocol to use for a 426, or Retry-After in
    seconds, rounded up, if a retry can help.

    SDKs retry a 429 unless `x-should-retry` is false. It is false if a budget is spent for hours or days.
    """
    if error.status == 401:
        return [(b"www-authenticate", b'Bearer realm="mlxd"')]
    if isinstance(error, UpgradeRequired):
        return [(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")]
    if error.retry_after_s <= 0:
        return []
    headers = [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
    return [*headers, (b"x-should-retry", b"false")] if isinstance(error, BudgetSpent) else headers
