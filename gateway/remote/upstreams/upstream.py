"""Requests sent to upstreams: for models that only upstreams have, and as a fallback of a model.

Requests leave this machine only if the configuration names an upstream for the model and the caller's key allows it.
They are not translated: the upstream must have the dialect of the request. The next upstream is tried until the first
byte of a response, and never after.

Body of a request for an upstream: the fields that decide its destination and its cost.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.rate_limit import EXPECTED_COMPLETION, Meter, UsageCharge
from gateway.api.anthropic.response import anthropic_body
from gateway.api.common.decode import check_json
from gateway.api.common.request_fields import FieldTable, RefusedField, refuse
from gateway.config.settings import UpstreamConfig
from gateway.errors import ApiError, BadRequest, Cancelled, Forbidden, Unavailable, Unsupported, openai_body
from gateway.http.bodies import read_body, send_body
from gateway.http.sse import StreamWatch, note_cut
from gateway.remote.upstreams.upstream_client import Unreachable, UpstreamResponse
from gateway.request.record import Header, RequestRecord, record_of, served_by_header
from gateway.services import Services
from protocol.codec import BYTES_PER_TOKEN, UNREADABLE

log = logging.getLogger(__name__)

# OpenAI's completions generate this many tokens if `max_tokens` is missing. Chats have no default.
_COMPLETION_TOKENS: Final = 16
_LIMITS: Final = ("max_tokens", "max_completion_tokens")

_ROUTE: Final = "the configuration chooses the model and the service of a request that leaves"
_REACH: Final = "a request that leaves reaches its upstream alone"
_PRICE: Final = "requests that leave have the usual price"
# Fields of OpenRouter, LiteLLM, OpenAI and Anthropic that choose another model or price, or let the service use others.
_REFUSED: Final[FieldTable] = {
    **dict.fromkeys(["models", "route", "provider", "preset", "api_base", "base_url", "api_key"], RefusedField(_ROUTE)),
    **dict.fromkeys(["fallbacks", "context_window_fallbacks", "content_policy_fallbacks"], RefusedField(_ROUTE)),
    **dict.fromkeys(["model_list", "user_config", "custom_llm_provider", "inference_geo"], RefusedField(_ROUTE)),
    **dict.fromkeys(["plugins", "web_search_options", "mcp_servers", "container"], RefusedField(_REACH)),
    "service_tier": RefusedField(_PRICE, ("auto", "default", "flex", "standard_only")),
    "speed": RefusedField(_PRICE, ("standard",)),
}
# Types of tools that the client runs. Services run the others themselves, on the web for instance.
_CLIENT_TOOLS: Final = re.compile(r"function|custom|(bash|text_editor|computer|memory)_\d+")

_Choices = Annotated[int, Meta(ge=1, le=1 << 20)]
# -1 means no limit.
_Tokens = Annotated[int, Meta(ge=-1, le=1 << 40)]


class RoutedFields(msgspec.Struct, frozen=True):
    """Fields that decide the destination of a request."""

    model: str = ""
    stream: bool | None = False


class _CostFields(msgspec.Struct, frozen=True):
    """Fields that decide the cost of a request."""

    n: _Choices | None = None
    best_of: _Choices | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    prompt: str | list[msgspec.Raw] | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences: prompts times choices."""
        prompts = 1
        if isinstance(self.prompt, list) and self.prompt and bytes(self.prompt[0])[:1] in (b'"', b"["):
            prompts = len(self.prompt)
        return prompts * max(self.n or 1, self.best_of or 1)


_routed_fields: Final = msgspec.json.Decoder(RoutedFields)
_cost_fields: Final = msgspec.json.Decoder(_CostFields)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class UpstreamBody:
    """A body that is within its key's limits. `max_tokens` is the limit of each sequence; None means no limit."""

    sequences: int
    max_tokens: int | None
    fields: dict[str, msgspec.Raw]

    def with_model(self, model: str) -> bytes:
        """Encode the body with the model's name at the upstream. All other fields stay unchanged."""
        return msgspec.json.encode(self.fields | {"model": msgspec.Raw(msgspec.json.encode(model))})


def read_routed_fields(body: bytes) -> RoutedFields:
    """Decode the fields. They are empty if the body is invalid, which the endpoint will refuse."""
    try:
        return _routed_fields.decode(body)
    except UNREADABLE:
        return RoutedFields()


def bounded_body(body: bytes, tokens_max: int) -> UpstreamBody:
    """Limit the tokens of each sequence of a body to `tokens_max`; 0 means no limit.

    Raises `BadRequest`, also for fields that choose another model, service or price.
    """
    check_json(body)
    try:
        cost, fields = _cost_fields.decode(body), _fields.decode(body)
    except UNREADABLE as error:
        raise BadRequest(f"The body is not valid: {error}.") from None
    refuse({name: _value(fields[name]) for name in fields if name in _REFUSED}, _REFUSED)
    _check_tools(_value(fields.get("tools")))
    # Other servers refuse mlxd's own field for extras of the answer.
    fields.pop("x_mlxd", None)
    limits = {name: limit for name in _LIMITS if (limit := getattr(cost, name)) is not None}
    if not limits and cost.prompt is not None:
        limits = {"max_tokens": _COMPLETION_TOKENS}
    if tokens_max:
        limits = {name: min(limit, tokens_max) if limit >= 0 else tokens_max for name, limit in limits.items()}
        limits = limits or {"max_tokens": tokens_max}
        fields |= {name: msgspec.Raw(b"%d" % limit) for name, limit in limits.items()}
    most = max(limits.values()) if limits and min(limits.values()) >= 0 else None
    return UpstreamBody(cost.sequences, most, fields)


def _value(field: msgspec.Raw | None) -> Any:
    return None if field is None else msgspec.json.decode(field)


def _check_tools(tools: Any) -> None:
    """Raises `Unsupported` for a tool that the upstream would run."""
    for index, tool in enumerate(cast(list[Any], tools) if isinstance(tools, list) else []):
        kind = cast(dict[str, Any], tool).get("type") if isinstance(tool, dict) else None
        if kind is not None and not (isinstance(kind, str) and _CLIENT_TOOLS.fullmatch(kind)):
            message = f"Tools of the type {str(kind)[:100]!r} are not supported: the client must run its tools."
            raise Unsupported(message, f"tools[{index}].type")


RETRY_AFTER_S: Final = 5.0
# A larger event of an upstream is passed on before its end.
EVENT_BYTES_MAX: Final = 256 * 1024


class UpstreamFallback:
    """ASGI wrapper of an endpoint of `dialect`. Without `[upstreams]` in the configuration, it only calls
    the endpoint.
    """

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
        fields = await services.bodies.work(len(body), read_routed_fields, body)
        name, router = fields.model, services.live.router
        if owners := router.upstreams_of(name, record.caller):
            await self._forward(_ForwardedRequest(name, body, bool(fields.stream), owners, None), scope, receive, send)
            return
        started = _StartedSend(send)
        try:
            await self._endpoint(scope, _replay(body, receive), started)
        except ApiError as error:
            model, owners = router.fallback(name, record.caller, self._dialect, error)
            if not owners or started.is_started:
                raise
            log.warning("request %s for %s leaves: %s", record.id, name, error.message)
            record.headers = []
            await self._forward(
                _ForwardedRequest(model, body, bool(fields.stream), owners, error), scope, receive, send
            )

    async def _forward(self, forwarding: "_ForwardedRequest", scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response of the first upstream that responds. Raises `ApiError` if none does."""
        services, record = self._services, record_of(scope)
        caller = record.caller
        record.model, record.stream = forwarding.name, forwarding.is_stream
        services.admission.check_open(forwarding.name)
        if not caller.may_leave:
            raise Forbidden(
                f"The model {forwarding.name!r} is served by an upstream, and this key's requests may not leave."
            )
        upstreams = [upstream for upstream in forwarding.upstreams if upstream.dialect == self._dialect]
        if not upstreams:
            theirs = " or ".join(sorted({upstream.dialect for upstream in forwarding.upstreams}))
            raise BadRequest(
                f"The upstream of {forwarding.name!r} speaks another API: {theirs}.", "model", "unsupported_api"
            )
        with ExitStack() as held:
            try:
                work = services.bodies.work
                body = await work(len(forwarding.body), bounded_body, forwarding.body, caller.max_tokens)
            except BadRequest as refusal:
                # This daemon takes the request, and the upstream is not to have it.
                raise (forwarding.error or refusal) from None
            charge = None
            if (meter := caller.meter) is not None:
                charge = held.enter_context(meter.hold(_estimate(forwarding, body, meter), body.sequences))
            request = _UpstreamRequest(record, body.sequences)
            held.enter_context(services.requests.hold(request))
            held.enter_context(services.upstreams.running())
            async with StreamWatch(receive) as watch:
                client = _WatchedSend(send, watch)
                try:
                    async with request.until_cancelled():
                        try:
                            answer = await self._request(forwarding, body, upstreams, scope, request)
                            await self._pass_on(forwarding, answer, record, client)
                        finally:
                            if request.answer is not None:
                                await request.answer.close()
                            self._record_usage(forwarding, body, request, charge)
                except ApiError as error:
                    # A response that has started cannot be continued by another upstream.
                    if not client.is_started:
                        raise
                    record.outcome = error.outcome
                    await client({"type": "http.response.body", "body": self._in_band(error, record)})
            if watch.reason is not None:
                note_cut(record, watch.reason)

    def _record_usage(
        self,
        forwarding: "_ForwardedRequest",
        body: UpstreamBody,
        request: "_UpstreamRequest",
        charge: UsageCharge | None,
    ) -> None:
        """Record the usage that an upstream reports, or the expected usage if the request was sent and its answer was
        not received."""
        record, answer = request.record, request.answer
        if answer is None and not request.is_sent:
            return
        prompt = completion = 0
        if answer is not None:
            prompt, completion = answer.usage(len(forwarding.body), body.sequences, body.max_tokens)
        if answer is None or (answer.status < 400 and not answer.is_received):
            expected = body.sequences * _expected(record.caller.meter, body.max_tokens)
            prompt, completion = prompt or len(forwarding.body) // BYTES_PER_TOKEN, max(completion, int(expected))
        record.prompt_tokens, record.completion_tokens = prompt, completion
        # If the request started and then failed in this gateway, it was already counted.
        requests = 0 if record.is_recorded else body.sequences
        self._services.ledger.record(record.caller.key or "", forwarding.name, requests, prompt, 0, completion)
        if charge is not None:
            charge.prompt, charge.completion = prompt, completion

    async def _request(
        self,
        forwarding: "_ForwardedRequest",
        body: UpstreamBody,
        upstreams: Sequence[UpstreamConfig],
        scope: Scope,
        request: "_UpstreamRequest",
    ) -> UpstreamResponse:
        """Return the response of the first upstream that serves the request, or else the last upstream's refusal."""
        services, record = self._services, record_of(scope)
        metrics = services.metrics
        refusal: UpstreamResponse | None = None
        for upstream in upstreams:
            record.served_by = upstream.name
            if refusal is not None:
                await refusal.close()
                refusal = None
            try:
                sent = await services.bodies.work(
                    len(forwarding.body), body.with_model, upstream.models[forwarding.name]
                )
                with request.sending():
                    answer = await services.upstreams.send(upstream, scope, sent)
            except Unreachable as error:
                metrics.upstream_requests[upstream.name, forwarding.name, error.reason] += 1
                log.warning("upstream %s: %s", upstream.name, error)
                continue
            metrics.upstream_requests[upstream.name, forwarding.name, str(answer.status)] += 1
            if answer.status < 400:
                request.answer = answer
                return answer
            text = "" if _is_for_client(answer) else await answer.excerpt()
            log.warning("upstream %s refuses %s: HTTP %d %s", upstream.name, forwarding.name, answer.status, text)
            refusal = answer
            if not answer.is_its_own:
                break
        if forwarding.error is None and refusal is not None and _is_for_client(refusal):
            request.answer = refusal
            return refusal
        if refusal is not None:
            await refusal.close()
        record.served_by = ""
        if forwarding.error is not None:
            raise forwarding.error
        if refusal is None:
            message = f"The upstream of {forwarding.name} gave no valid answer."
            raise Unavailable(message, RETRY_AFTER_S, "upstream_unavailable")
        # The refusal's text is only logged, because it is about this daemon's key or is a page of a proxy.
        problem = "does not serve this daemon" if refusal.is_about_key else f"answered with HTTP {refusal.status}"
        raise Unavailable(f"The upstream of {forwarding.name} {problem}.", code="upstream_unavailable")

    async def _pass_on(
        self, forwarding: "_ForwardedRequest", answer: UpstreamResponse, record: RequestRecord, send: Send
    ) -> None:
        headers: list[Header] = [*answer.headers, *served_by_header(record.served_by)]
        if not answer.is_stream:
            try:
                body = await answer.read()
            except Unreachable as error:
                raise Unavailable(
                    f"The upstream of {forwarding.name} broke off.", RETRY_AFTER_S, error.reason
                ) from None
            await send_body(send, answer.status, body, headers)
            return
        start = [(b"content-type", answer.kind.encode()), *headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": start})
        try:
            async for events in whole_events(answer.pieces()):
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except Unreachable as error:
            if not answer.has_end:
                message = f"The upstream of {forwarding.name} broke off."
                raise Unavailable(message, RETRY_AFTER_S, error.reason) from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _in_band(self, error: ApiError, record: RequestRecord) -> bytes:
        if self._dialect == "anthropic":
            return b"\n\nevent: error\ndata: " + anthropic_body(error, record.id) + b"\n\n"
        return b"\n\ndata: " + openai_body(error) + b"\n\n"


async def whole_events(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the pieces of a stream so that each ends with an event, except for the last piece and very large events.

    If the stream breaks off, clients thus get no part of an event, which they could not parse, before the error.
    """
    held = b""
    async for piece in pieces:
        held += piece
        end = max(held.rfind(mark) + len(mark) if mark in held else 0 for mark in (b"\n\n", b"\r\n\r\n"))
        if end := end or (len(held) if len(held) > EVENT_BYTES_MAX else 0):
            yield held[:end]
            held = held[end:]
    if held:
        yield held


@dataclass(frozen=True, slots=True)
class _ForwardedRequest:
    """Request for upstreams. `error` is why this daemon could not serve it; None if only upstreams have the model."""

    name: str
    body: bytes
    is_stream: bool
    upstreams: Sequence[UpstreamConfig]
    error: ApiError | None


class _StartedSend:
    """A `send` that records whether the response has started."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        self.is_started = True
        await self._send(message)


class _WatchedSend(_StartedSend):
    """A `send` that reports each write to the watch for clients that do not read."""

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


class _UpstreamRequest:
    """Request at an upstream, as the list of running requests shows it. Its tokens are known only at its end."""

    state = "upstream"
    prompt_tokens = cached_tokens = prefilled_tokens = generated_tokens = 0
    prefill_left_s = None

    def __init__(self, record: RequestRecord, sequences: int) -> None:
        self.record = record
        self.sequences = sequences
        # Whether an upstream may have begun to generate; and its answer, once the head has arrived.
        self.is_sent = False
        self.answer: UpstreamResponse | None = None
        self._patience = asyncio.timeout(None)
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel the request by order of an operator."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self._patience.reschedule(0.0)

    @contextmanager
    def sending(self) -> Generator[None]:
        """Note that the request was sent, unless the block ends with a head, or shows that the upstream got nothing."""
        was_sent, self.is_sent = self.is_sent, True
        try:
            yield
            self.is_sent = was_sent
        except Unreachable as error:
            self.is_sent = was_sent or error.is_sent
            raise

    @asynccontextmanager
    async def until_cancelled(self) -> AsyncGenerator[None]:
        """Run the block until it ends, or until `cancel`, which makes it raise `Cancelled`."""
        try:
            async with self._patience:
                yield
        except TimeoutError:
            if not self._is_cancelled:
                raise
            raise Cancelled from None


def _is_for_client(refusal: UpstreamResponse) -> bool:
    return refusal.is_of_api and not refusal.is_about_key


def _estimate(forwarding: _ForwardedRequest, body: UpstreamBody, meter: Meter) -> float:
    """Return the estimated tokens to charge."""
    return len(forwarding.body) / BYTES_PER_TOKEN + body.sequences * _expected(meter, body.max_tokens)


def _expected(meter: Meter | None, max_tokens: int | None) -> float:
    """Return the number of tokens that a sequence is expected to have."""
    if meter is not None:
        return meter.expected(max_tokens)
    return EXPECTED_COMPLETION if max_tokens is None else min(max_tokens, EXPECTED_COMPLETION)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Make a `receive` that first returns a body that was already read."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
