"""`POST /v1/messages` and `POST /v1/messages/count_tokens`.

Anthropic's `diagnostics`: why the prompt of an earlier message was not a prefix of this one.
"""

from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import UNSET
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.api.anthropic.request import MessagesRequest, decode_count, decode_messages, lower_messages, lower_prompt
from gateway.api.anthropic.response import (
    AnthropicDiagnostics,
    AnthropicTokenCount,
    CacheMissReason,
    Diagnostics,
    MessageAdditions,
    MessageFold,
    MessageStream,
)
from gateway.api.common import serve
from gateway.api.common.request_fields import extras_of
from gateway.http.bodies import send_body
from gateway.http.sse import cut_off
from gateway.request.record import RequestRecord, record_of
from gateway.request.why_slow import Diagnosis
from gateway.services import Services
from protocol.from_worker import MissCause, MissCode

_TYPES: Final[dict[str, str]] = {
    MissCode.SYSTEM: "system_changed",
    MissCode.TOOLS: "tools_changed",
    MissCode.TOOL_ORDER: "tools_changed",
    MissCode.MESSAGE: "messages_changed",
    MissCode.DATE: "messages_changed",
    MissCode.MEDIA: "messages_changed",
    MissCode.THOUGHTS_UNSENT: "messages_changed",
}
_UNAVAILABLE: Final = "unavailable"


def diagnostics_of(services: Services, record: RequestRecord, request: MessagesRequest) -> Callable[[], Diagnostics]:
    """Return the function that makes the field of the answer, and begin the comparison that the request asks for."""
    if request.diagnostics is None:
        return lambda: UNSET
    if request.diagnostics.previous_message_id is None:
        return lambda: None
    diagnosis = Diagnosis(services, record, request.diagnostics.previous_message_id)
    record.comparison = diagnosis
    return lambda: _diagnostics(diagnosis)


def _diagnostics(diagnosis: Diagnosis) -> AnthropicDiagnostics | None:
    if diagnosis.other is None:
        return AnthropicDiagnostics(CacheMissReason("previous_message_not_found"))
    if diagnosis.is_other_model:
        return AnthropicDiagnostics(CacheMissReason("model_changed", diagnosis.other.timing.prompt_tokens))
    if not diagnosis.is_final:
        return AnthropicDiagnostics(None)
    if (cause := diagnosis.difference) is not None:
        return AnthropicDiagnostics(_reason(diagnosis, cause))
    return None if diagnosis.is_compared else AnthropicDiagnostics(CacheMissReason(_UNAVAILABLE))


def _reason(diagnosis: Diagnosis, cause: MissCause) -> CacheMissReason:
    kind = _TYPES.get(cause.code, _UNAVAILABLE)
    if cause.code == MissCode.DATE and cause.role == "system":
        kind = "system_changed"
    tokens = UNSET if kind == _UNAVAILABLE else cause.tokens
    return CacheMissReason(kind, tokens, diagnosis.words(cause))


BETAS_MAX: Final = 50


class MessagesEndpoint:
    """ASGI endpoint of messages, streamed or whole."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_messages)
        ignored = unknown + _betas(scope)
        model, seed = serve.begin(services, record, request.model, bool(request.stream), request.seed, ignored)
        job = await serve.prepare(
            services, record, model, lambda next_rid, ms: lower_messages(request, model, next_rid, seed, ms)
        )
        message_id = record.answer_id = serve.new_id("msg").replace("-", "_")
        additions = MessageAdditions(diagnostics_of(services, record, request), extras_of(request.x_mlxd, record))
        if request.stream:
            await job.stream(MessageStream(message_id, model.full_name, additions), receive, send)
        else:
            await job.whole(MessageFold(message_id, model.full_name, additions), receive, send)


class CountTokens:
    """ASGI endpoint of token counts."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_count)
        model, _ = serve.begin(services, record, request.model, False, None, unknown)
        prompt, _ = await services.bodies.work(record.body_bytes, lower_prompt, request, model.thinking)
        async with cut_off(record, receive):
            tokenized = await serve.tokenize(services, record, model, prompt)
            await send_body(send, 200, msgspec.json.encode(AnthropicTokenCount(tokenized.count)), record.headers)


def _betas(scope: Scope) -> list[str]:
    """List the betas that a client asks for. Fields that a beta adds to the body are accepted even without the beta."""
    names = ",".join(Headers(scope=scope).getlist("anthropic-beta")).split(",")
    return [f"beta.{name.strip()}" for name in names[:BETAS_MAX] if name.strip()]
