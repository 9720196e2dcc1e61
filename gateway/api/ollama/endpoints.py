"""`POST /api/chat` and `POST /api/generate`: answers, or without a prompt the load or unload of a model."""

from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.ollama.encoder import ChatForm, GenerateForm, LineFold, LineForm, LineStream
from gateway.api.ollama.load_orders import LoadOrder
from gateway.api.ollama.lowering import conversation_of, lower_chat, lower_generate
from gateway.api.ollama.options import read_options
from gateway.api.ollama.request import GenerationFields, decode_chat, decode_generate, is_empty
from gateway.api.ollama.response import ChatLine, GenerateLine, OllamaMessage, timestamp
from gateway.config.settings import ModelConfig
from gateway.http.sse import JSON_LINES
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from protocol.to_worker import Generate


class Chat:
    """ASGI endpoint of `POST /api/chat`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._loading = LoadOrder(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, decode_chat)
        model, seed = _begin(services, record, request, ignored)
        name = request.model or model.name
        if not request.messages:
            reason = await self._loading.run(record, model, receive, is_last=request.is_last)
            message = OllamaMessage("assistant", "")
            line = ChatLine(model=name, created_at=timestamp(), message=message, done=True, done_reason=reason)
            await self._loading.tell(record, line, request, send)
            return
        job = await _job(services, record, model, lambda ms: lower_chat(request, model, _rid(services), seed, ms))
        await _answer(job, ChatForm(name), request, receive, send)


class Complete:
    """ASGI endpoint of `POST /api/generate`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._loading = LoadOrder(services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, decode_generate)
        model, seed = _begin(services, record, request, ignored)
        name = request.model or model.name
        if is_empty(request):
            reason = await self._loading.run(record, model, receive, is_last=request.is_last)
            line = GenerateLine(model=name, created_at=timestamp(), response="", done=True, done_reason=reason)
            await self._loading.tell(record, line, request, send)
            return
        job = await _job(services, record, model, lambda ms: lower_generate(request, model, _rid(services), seed, ms))
        turns = None if request.raw or request.suffix else conversation_of(request)
        await _answer(job, GenerateForm(name, turns), request, receive, send)


def _begin(
    services: Services, record: RequestRecord, request: GenerationFields, ignored: list[str]
) -> tuple[ModelConfig, int]:
    options, _ = read_options(request.options)
    return serve.begin(services, record, request.model, request.is_stream, options.wanted_seed, ignored)


def _rid(services: Services) -> Callable[[], int]:
    return services.link.next_rid


async def _job(
    services: Services, record: RequestRecord, model: ModelConfig, action: Callable[[int], Generate]
) -> serve.PreparedRequest:
    """Lower a request by `action`, which is given its deadline. Raises `ApiError`."""
    deadline_ms = serve.deadline_ms(services)
    generates = await serve.lower(services, record, model, lambda: action(deadline_ms))
    return serve.PreparedRequest(services, record, model, generates)


async def _answer(
    job: serve.PreparedRequest, form: LineForm, request: GenerationFields, receive: Receive, send: Send
) -> None:
    if request.is_stream:
        await job.stream(LineStream(form, job.record), receive, send, JSON_LINES)
    else:
        await job.whole(LineFold(form, job.record), receive, send)
