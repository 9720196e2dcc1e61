"""The outermost layer: a request id, one access line, and the one place where exceptions become answers."""

import logging
import re
import secrets
import time
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError, error_headers, openai_body
from gateway.http import CLIENT_CLOSED, Answer, ClientLeft, Record, send_body
from gateway.metrics import Metrics
from gateway.schemas.anthropic_out import anthropic_body

log = logging.getLogger(__name__)

# Polled by machines: their lines would drown the others.
QUIET: Final = frozenset({"/livez", "/readyz", "/health", "/healthz", "/metrics", "/v1/status", "/"})
# What counts as a request of an API; a list of models does not.
API: Final = ("POST", "/v1/")
# Answered in Anthropic's shape, also when something goes wrong; on other paths a header tells its clients.
ANTHROPIC: Final = "/v1/messages"
ANTHROPIC_HEADER: Final = "anthropic-version"

_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Entry:
    """Pure ASGI. Everything below may raise `ApiError`; what else it raises is a 500, logged once and counted."""

    def __init__(self, app: ASGIApp, metrics: Metrics, is_public: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._is_public = is_public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)
            case _:
                await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(_request_id(scope), scope["method"], scope["path"])
        record.is_anthropic = record.path.startswith(ANTHROPIC) or ANTHROPIC_HEADER in Headers(scope=scope)
        scope["mlxd.record"] = record
        # Makes starlette raise HTTPException instead of answering in plain text.
        scope["app"] = self
        answer = Answer(send, record)
        try:
            await self._app(scope, receive, answer)
        except ApiError as error:
            await self._refuse(answer, record, error)
        except HTTPException as error:
            await self._refuse(answer, record, _from_http(error, scope))
        except ClientLeft:
            record.status = CLIENT_CLOSED
            record.outcome = "disconnect"
        except Exception as error:  # The root of a request's task.
            self._metrics.unhandled_errors += 1
            log.error("request failed", exc_info=error, extra={"fields": {"request": record.id, "path": record.path}})
            await self._refuse(answer, record, ApiError(500, "Internal error.", type="server_error", code="internal"))
        finally:
            self._account(record)

    async def _refuse(self, answer: Answer, record: Record, error: ApiError) -> None:
        record.outcome = error.code or "error"
        if not answer.is_started:
            body = anthropic_body(error, record.id) if record.is_anthropic else openai_body(error)
            await send_body(answer, error.status, body, [*error_headers(error), *record.headers])

    def _account(self, record: Record) -> None:
        method, prefix = API
        if self._is_public and record.method == method and record.path.startswith(prefix):
            self._metrics.request_ended(record.model, record.caller.key, record.status)
        level = logging.DEBUG if record.path in QUIET else logging.INFO
        if not log.isEnabledFor(level):
            return
        fields: dict[str, object] = {
            "request": record.id,
            "status": record.status,
            "ms": round((time.perf_counter() - record.started) * 1000, 1),
        }
        if record.caller.key is not None:
            fields["key"] = record.caller.key
        if record.model is not None:
            first = record.first_token_s
            fields |= {
                "model": record.model,
                "stream": record.stream,
                "ttft_ms": None if first is None else round(first * 1000, 1),
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
            }
        fields["outcome"] = record.outcome or "ok"
        if record.detail:
            fields["detail"] = record.detail
        log.log(level, "%s %s", record.method, record.path[:200], extra={"fields": fields})


def _request_id(scope: Scope) -> str:
    """The client's id, if a log line can carry it; else one of ours."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def _from_http(error: HTTPException, scope: Scope) -> ApiError:
    match error.status_code:
        case 404:
            return ApiError(404, f"Unknown path: {scope['method']} {scope['path'][:200]}.", code="unknown_url")
        case 405:
            return ApiError(405, f"{scope['method']} is not allowed here.", code="method_not_allowed")
        case status:
            return ApiError(status, str(error.detail))


async def _lifespan(receive: Receive, send: Send) -> None:
    """Start and stop belong to the daemon, not to the app."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
