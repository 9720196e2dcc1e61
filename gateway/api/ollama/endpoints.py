"""`POST /api/chat` and `POST /api/generate`. Without a prompt, a request loads or unloads its model."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.extras import extras_of
from gateway.api.ollama.encoder import ChatForm, GenerateForm, LineFold, LineForm, LineStream
from gateway.api.ollama.load_orders import load_or_unload
from gateway.api.ollama.lowering import check_load, conversation_of, lower_chat, lower_generate
from gateway.api.ollama.options import read_options
from gateway.api.ollama.request import (
    GenerateRequest,
    GenerationFields,
    OllamaChatRequest,
    decode_chat,
    decode_generate,
    is_empty,
)
from gateway.config.settings import ModelConfig
from gateway.http.exchange import JSON, send_body
from gateway.http.sse import JSON_LINES
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from protocol.to_worker import Generate

R = TypeVar("R", bound=GenerationFields)


class Chat:
    """ASGI endpoint of `POST /api/chat`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def make_form(request: OllamaChatRequest, name: str, record: RequestRecord) -> LineForm:
            return ChatForm(name, record, extras_of(request.x_mlxd, record))

        await _respond(self._services, scope, receive, send, decode_chat, lower_chat, make_form)


class Complete:
    """ASGI endpoint of `POST /api/generate`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def make_form(request: GenerateRequest, name: str, record: RequestRecord) -> LineForm:
            has_turns = not (request.raw or request.suffix or is_empty(request))
            turns = conversation_of(request) if has_turns else None
            return GenerateForm(name, record, turns, extras_of(request.x_mlxd, record))

        await _respond(self._services, scope, receive, send, decode_generate, lower_generate, make_form)


async def _respond(
    services: Services,
    scope: Scope,
    receive: Receive,
    send: Send,
    decode: Callable[[bytes], tuple[R, list[str]]],
    lower: Callable[[R, ModelConfig, Callable[[], int], int, int], Generate],
    make_form: Callable[[R, str, RequestRecord], LineForm],
) -> None:
    record = record_of(scope)
    request, ignored = await serve.read(services, record, scope, receive, decode)
    options, _ = read_options(request.options)
    model, seed = serve.begin(services, record, request.model, request.is_stream, options.wanted_seed, ignored)
    form = make_form(request, request.model or model.name, record)
    if is_empty(request):
        check_load(request, model)
        reason = await load_or_unload(services, record, model, receive, is_last=request.is_last)
        # The single line is also the whole stream, if the request asks for a stream.
        body = msgspec.json.encode(form.loaded(reason)) + (b"\n" if request.is_stream else b"")
        await send_body(send, 200, body, record.headers, JSON_LINES if request.is_stream else JSON)
        return
    job = await serve.prepare(services, record, model, lambda next_rid, ms: lower(request, model, next_rid, seed, ms))
    if request.is_stream:
        await job.stream(LineStream(form), receive, send, JSON_LINES)
    else:
        await job.whole(LineFold(form), receive, send)
