"""Requests that leave this machine: models of upstreams, and upstreams as a fallback of a model.

Only where the configuration names the upstream for the model, and the caller's key may leave. A request is passed on in
the dialect that it came in, to an upstream that speaks it; there is no translation. An upstream is replaced by the next
one until the first byte of an answer, and never after.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.caller import Caller
from gateway.access.rate_limit import Meter, UsageCharge
from gateway.api.anthropic.response import anthropic_body
from gateway.config.remote_settings import UpstreamConfig
from gateway.config.settings import FallbackConfig, ModelConfig
from gateway.errors import (
    ApiError,
    BadRequest,
    Cancelled,
    Forbidden,
    ModelNotFound,
    Overloaded,
    Unavailable,
    openai_body,
)
from gateway.http.exchange import read_body, send_body
from gateway.http.sse import StreamWatch, note_cut
from gateway.remote.peers.upstream_client import Unreachable, UpstreamResponse
from gateway.remote.upstreams.upstream_body import LeavingBody, bounded_body, read_asked
from gateway.request.headers import served_by_header
from gateway.request.record import Header, RequestRecord, record_of
from gateway.services import Services
from protocol.codec import BYTES_PER_TOKEN

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5.0
# Refusals of this daemon that are no reason to send a request elsewhere: it ends, or the request itself is at fault.
_STAYS: Final = frozenset({"draining", "cancelled", "body_memory_full"})


class UpstreamFallback:
    """Wraps an endpoint of `dialect`. Without `[upstreams]` it is that endpoint, at no cost."""

    def __init__(self, endpoint: ASGIApp, services: Services, dialect: str) -> None:
        self._endpoint = endpoint
        self._services = services
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        if not services.config.upstreams:
            await self._endpoint(scope, receive, send)
            return
        record = record_of(scope)
        body = await read_body(scope, receive, services.config.server.max_body_bytes)
        asked = await services.bodies.work(len(body), read_asked, body)
        name, model = asked.model, self._local(asked.model, record.caller)
        owners = _owners(services.config.upstreams.values(), name)
        if model is None and owners and record.caller.may_use(ModelConfig(name=name, path="")):
            await self._forward(_Way(name, body, bool(asked.stream), owners, None), scope, receive, send)
            return
        started = _Started(send)
        try:
            await self._endpoint(scope, _replay(body, receive), started)
        except ApiError as error:
            way = self._fallback(model, body, bool(asked.stream), error, record.caller)
            if way is None or started.is_started:
                raise
            log.warning("request %s for %s leaves: %s", record.id, name, error.message)
            record.headers = []
            await self._forward(way, scope, receive, send)

    def _local(self, name: str, caller: Caller) -> ModelConfig | None:
        """The model of this daemon or its peers behind a name; None where there is none, or not for this caller."""
        try:
            return self._services.router.locate(name, caller).model
        except (ModelNotFound, BadRequest):
            return None

    def _fallback(
        self, model: ModelConfig | None, body: bytes, is_stream: bool, error: ApiError, caller: Caller
    ) -> "_Way | None":
        # An upstream has other weights than an adapter.
        if (
            model is None
            or model.adapter
            or not model.fallback.to
            or not caller.may_leave
            or not _is_reason(model.fallback, error)
        ):
            return None
        named = [self._services.config.upstreams[name] for name in model.fallback.to]
        owners = [upstream for upstream in named if model.name in upstream.models]
        same = [upstream for upstream in owners if upstream.dialect == self._dialect]
        return _Way(model.name, body, is_stream, same, error) if same else None

    async def _forward(self, way: "_Way", scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by the first upstream that does. Raises `ApiError` where none does."""
        services, record = self._services, record_of(scope)
        caller = record.caller
        record.model, record.stream = way.name, way.is_stream
        services.admission.check_open(way.name)
        if not caller.may_leave:
            raise Forbidden(f"The model {way.name!r} is served by an upstream, and this key's requests may not leave.")
        upstreams = [upstream for upstream in way.upstreams if upstream.dialect == self._dialect]
        if not upstreams:
            theirs = " or ".join(sorted({upstream.dialect for upstream in way.upstreams}))
            raise BadRequest(f"The upstream of {way.name!r} speaks another API: {theirs}.", "model", "unsupported_api")
        with ExitStack() as held:
            body = await services.bodies.work(len(way.body), bounded_body, way.body, caller.max_tokens)
            bill = None
            if (meter := caller.meter) is not None:
                bill = held.enter_context(meter.hold(_estimate(way, body, meter), body.sequences))
            passing = _Passing(record, body.sequences)
            held.enter_context(services.requests.hold(passing))
            held.enter_context(services.upstreams.running())
            async with StreamWatch(receive, services.config.server.write_timeout_s) as watch:
                client = _Watched(send, watch)
                try:
                    async with passing.until_cancelled():
                        answer = await self._ask(way, body, upstreams, scope)
                        try:
                            await self._pass_on(way, answer, record, client)
                        finally:
                            await answer.close()
                            self._book(way, body, answer, record, bill)
                except ApiError as error:
                    # In the stream: no other upstream goes on with another's text.
                    if not client.is_started:
                        raise
                    record.outcome = error.outcome
                    await client({"type": "http.response.body", "body": self._in_band(error, record)})
            if watch.reason is not None:
                note_cut(record, watch.reason)

    def _book(
        self, way: "_Way", body: LeavingBody, answer: UpstreamResponse, record: RequestRecord, bill: UsageCharge | None
    ) -> None:
        prompt, completion = answer.usage(len(way.body), body.sequences, body.max_tokens)
        record.prompt_tokens, record.completion_tokens = prompt, completion
        # What failed here after it had begun is a request already.
        requests = 0 if record.is_booked else body.sequences
        self._services.ledger.book(record.caller.key or "", way.name, requests, prompt, 0, completion)
        if bill is not None:
            bill.prompt, bill.completion = prompt, completion

    async def _ask(
        self, way: "_Way", body: LeavingBody, upstreams: Sequence[UpstreamConfig], scope: Scope
    ) -> UpstreamResponse:
        """The beginning of an answer: of the first upstream that takes the request, or the refusal of the last."""
        services, record = self._services, record_of(scope)
        metrics = services.metrics
        refusal: UpstreamResponse | None = None
        for upstream in upstreams:
            record.served_by = upstream.name
            if refusal is not None:
                await refusal.close()
                refusal = None
            try:
                sent = await services.bodies.work(len(way.body), body.named, upstream.models[way.name])
                answer = await services.upstreams.ask(upstream, scope, sent)
            except Unreachable as error:
                metrics.upstream_requests[upstream.name, way.name, error.reason] += 1
                log.warning("upstream %s: %s", upstream.name, error)
                continue
            metrics.upstream_requests[upstream.name, way.name, str(answer.status)] += 1
            if answer.status < 400:
                return answer
            text = "" if _is_for_client(answer) else await answer.opening()
            log.warning("upstream %s refuses %s: HTTP %d %s", upstream.name, way.name, answer.status, text)
            refusal = answer
            if not answer.is_its_own:
                break
        if way.error is None and refusal is not None and _is_for_client(refusal):
            return refusal
        if refusal is not None:
            await refusal.close()
        record.served_by = ""
        if way.error is not None:
            raise way.error
        if refusal is None:
            message = f"The upstream of {way.name} gave no valid answer."
            raise Unavailable(message, RETRY_AFTER_S, "upstream_unavailable")
        # Its text is about the key of this daemon's operator, or a page of a proxy, and stays in the log.
        problem = "does not serve this daemon" if refusal.is_about_key else f"answered with HTTP {refusal.status}"
        raise Unavailable(f"The upstream of {way.name} {problem}.", code="upstream_unavailable")

    async def _pass_on(self, way: "_Way", answer: UpstreamResponse, record: RequestRecord, send: Send) -> None:
        headers: list[Header] = [*answer.headers, *served_by_header(record.served_by)]
        if not answer.is_stream:
            try:
                body = await answer.read()
            except Unreachable as error:
                raise Unavailable(f"The upstream of {way.name} broke off.", RETRY_AFTER_S, error.reason) from None
            await send_body(send, answer.status, body, headers)
            return
        start = [(b"content-type", answer.kind.encode()), *headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": start})
        try:
            async for piece in answer.pieces():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Unreachable as error:
            raise Unavailable(f"The upstream of {way.name} broke off.", RETRY_AFTER_S, error.reason) from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _in_band(self, error: ApiError, record: RequestRecord) -> bytes:
        if self._dialect == "anthropic":
            return b"\n\nevent: error\ndata: " + anthropic_body(error, record.id) + b"\n\n"
        return b"\n\ndata: " + openai_body(error) + b"\n\n"


@dataclass(frozen=True, slots=True)
class _Way:
    """A request that leaves. `error` is why it could not be served here; None for a model that only upstreams have."""

    name: str
    body: bytes
    is_stream: bool
    upstreams: Sequence[UpstreamConfig]
    error: ApiError | None


class _Started:
    """`send`, and whether an answer has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        self.is_started = True
        await self._send(message)


class _Watched(_Started):
    """The same, for the watch over a client that does not read."""

    def __init__(self, send: Send, watch: StreamWatch) -> None:
        super().__init__(send)
        self._watch = watch

    async def __call__(self, message: Message) -> None:
        watch = self._watch
        watch.is_sending = True
        await super().__call__(message)
        watch.is_sending = False
        watch.sent += 1
        watch.is_over = message["type"] == "http.response.body" and not message.get("more_body", False)


class _Passing:
    """A request at an upstream, for the list of requests. Its tokens are known at its end."""

    state = "upstream"
    prompt_tokens = cached_tokens = prefilled_tokens = generated_tokens = 0

    def __init__(self, record: RequestRecord, sequences: int) -> None:
        self.record = record
        self.sequences = sequences
        self._patience = asyncio.timeout(None)
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel it as an operator: its client gets an error that says so."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._patience.reschedule(0.0)

    @asynccontextmanager
    async def until_cancelled(self) -> AsyncGenerator[None]:
        """Be ended by `cancel`, which raises `Cancelled`."""
        try:
            async with self._patience:
                yield
        except TimeoutError:
            if not self._is_cancelled:
                raise
            raise Cancelled from None


def _is_for_client(refusal: UpstreamResponse) -> bool:
    return refusal.is_of_api and not refusal.is_about_key


def _is_reason(fallback: FallbackConfig, error: ApiError) -> bool:
    """Whether a refusal of this daemon is one for which the model's requests may leave."""
    if error.code in _STAYS:
        return False
    is_queue = isinstance(error, Overloaded) or error.code == "queue_timeout"
    kinds = {
        "queue": is_queue,
        "context": error.code == "context_length_exceeded",
        "unavailable": error.status == 503 and not is_queue,
    }
    return any(kinds[when] for when in fallback.when)


def _estimate(way: _Way, body: LeavingBody, meter: Meter) -> float:
    """Tokens that this will probably be charged."""
    return len(way.body) / BYTES_PER_TOKEN + body.sequences * meter.expected(body.max_tokens)


def _owners(upstreams: Iterable[UpstreamConfig], name: str) -> list[UpstreamConfig]:
    return [upstream for upstream in upstreams if name in upstream.models]


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` for an app that reads the body once more."""
    is_read = False

    async def again() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
