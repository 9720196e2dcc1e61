"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.api.anthropic.diagnostics import diagnostics_of
from gateway.api.anthropic.encoder import MessageAdditions, MessageFold, MessageStream
from gateway.api.anthropic.request import decode_count, decode_messages, lower_messages, lower_prompt
from gateway.api.anthropic.response import AnthropicTokenCount
from gateway.api.common import serve
from gateway.api.common.extras import extras_of
from gateway.http.exchange import send_body
from gateway.http.sse import cut_off
from gateway.request.record import record_of
from gateway.services import Services

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
