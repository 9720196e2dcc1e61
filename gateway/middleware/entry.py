"""Outermost middleware: it assigns request ids, writes the access log, and turns exceptions into answers."""

import logging
import re
import secrets
from typing import Final, assert_never

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.caller import NOBODY
from gateway.api.anthropic.response import anthropic_body
from gateway.api.decisions.typesafe import typesafe_body, typesafe_status
from gateway.api.ollama.response import ollama_body
from gateway.config.address import UNIX
from gateway.errors import ApiError, InternalError, UpgradeRequired, error_headers, openai_body
from gateway.http.bodies import CLIENT_CLOSED, ResponseSender, send_body
from gateway.http.capture import Recorder
from gateway.http.direct_write import writer_of
from gateway.middleware import access_log
from gateway.middleware.auth import dialect_of, is_of_api, is_websocket_handshake, versioned
from gateway.request.record import ClientLeft, Dialect, RequestRecord, read_context
from gateway.services import Services
from gateway.telemetry.metrics import operation_of

log = logging.getLogger(__name__)

_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class EntryMiddleware:
    """ASGI app that handles the exceptions of the app inside it. An `ApiError` becomes its answer; any other exception
    becomes a 500, which is logged once and counted.
    """

    def __init__(self, app: ASGIApp, services: Services, is_public: bool, unversioned: tuple[str, ...] = ()) -> None:
        """`unversioned` are the beginnings of paths below `/v1` that are also served without it."""
        self._app = app
        self._services = services
        self._is_public = is_public
        self._unversioned = unversioned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await _lifespan(receive, send)
            case _:
                # A handshake is a request whose answer switches the protocol.
                scope["method"] = "GET"
                await self._http(scope, receive, _RefusedHandshake(send))

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        client = self._services.live.proxies.client(scope) if self._is_public else UNIX
        scope["path"] = versioned(scope["path"], self._unversioned)
        clock = self._services.clock
        record = RequestRecord(
            _request_id(headers), scope["method"], scope["path"], client, started=clock(), clock=clock
        )
        record.dialect = dialect_of(record.path, headers)
        if "traceparent" in headers:
            record.trace = read_context(headers.getlist("traceparent"), headers.getlist("tracestate"))
        record.lease = self._services.bodies.lease()
        record.media_lease = self._services.media.lease()
        scope["mlxd.record"] = record
        # If `app` is set, starlette raises HTTPException instead of answering in plain text.
        scope["app"] = self
        recorder = None
        if self._is_public and self._services.captures.is_on and is_of_api(record.method, record.path):
            recorder = Recorder(scope, receive, send)
            receive, send = recorder.receive, recorder.send
        else:
            record.writer = writer_of(scope)
        answer = ResponseSender(send, record)
        try:
            if scope["type"] == "http" and is_websocket_handshake(record.method, headers):
                raise UpgradeRequired
            await self._app(scope, receive, answer)
        except ApiError as error:
            await self._refuse(answer, record, error)
        except HTTPException as error:
            if error.headers is not None and "Allow" in error.headers:
                record.headers.append((b"allow", error.headers["Allow"].encode()))
            await self._refuse(answer, record, _from_http(error, scope))
        except ClientLeft:
            record.status = CLIENT_CLOSED
            record.outcome = "disconnect"
        except Exception as error:  # Any other exception is a bug in the server.
            self._services.metrics.unhandled_errors += 1
            log.error("request failed", exc_info=error, extra={"fields": {"request": record.id, "path": record.path}})
            await self._refuse(answer, record, InternalError())
        finally:
            record.lease.close()
            record.media_lease.close()
            self._account(record, recorder)

    async def _refuse(self, answer: ResponseSender, record: RequestRecord, error: ApiError) -> None:
        record.outcome = error.outcome
        if not answer.is_started:
            headers = [*error_headers(error), *record.headers]
            status = typesafe_status(error) if record.dialect is Dialect.TYPESAFE else error.status
            await send_body(answer, status, _error_body(error, record), headers)

    def _account(self, record: RequestRecord, recorder: Recorder | None) -> None:
        services = self._services
        if self._is_public and is_of_api(record.method, record.path):
            services.metrics.request_ended(record.model, record.caller.key, record.status)
        is_batch = record.is_of_batch_class
        if record.model is not None and not is_batch and (operation := operation_of(record.path)):
            tokens = record.completion_tokens
            services.metrics.gen_ai.observe(
                operation,
                record.model,
                record.clock() - record.started,
                error=record.outcome,
                first_token_s=record.first_token_s,
                # The durations of several sequences are not known one by one.
                per_token_s=record.phases.decode / (tokens - 1) if tokens > 1 and len(record.finishes) == 1 else None,
            )
        tracer = services.tracer
        trace_id = tracer.export(record) if tracer is not None and record.model is not None else ""
        slow_s = 0.0 if is_batch else services.config.server.slow_request_s
        access_log.write(record, slow_s, services.sample, trace_id)
        # Captures of unauthenticated requests could evict those of other requests.
        if recorder is not None and record.caller is not NOBODY:
            services.captures.put(recorder.captured(record))


class _RefusedHandshake:
    """Wrapper of `send` that refuses a WebSocket by an HTTP answer."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        await self._send({**message, "type": f"websocket.{kind}"} if kind.startswith("http.") else message)


def _error_body(error: ApiError, record: RequestRecord) -> bytes:
    match record.dialect:
        case Dialect.OPENAI:
            return openai_body(error)
        case Dialect.ANTHROPIC:
            return anthropic_body(error, record.id)
        case Dialect.TYPESAFE:
            return typesafe_body(error)
        case Dialect.OLLAMA:
            return ollama_body(error)
        case _:
            assert_never(record.dialect)


def _request_id(headers: Headers) -> str:
    """Return the client's id if it is safe for a log line; otherwise a new one."""
    given = headers.get("x-request-id", "")
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
    """Answer lifespan events without doing anything; the daemon starts and stops its own parts."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
