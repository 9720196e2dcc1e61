"""`POST /v1/chat/completions`."""

from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.openai.chat_encoder import ChatFold, ChatStream
from gateway.api.openai.choices import Heading
from gateway.api.openai.lowering import lower_chat
from gateway.api.openai.request import decode_chat
from gateway.request.record import record_of
from gateway.services import Services


class ChatCompletions:
    """ASGI endpoint of chat completions, streamed or whole."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_chat)
        is_stream, choices = bool(request.stream), request.n or 1
        model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown, choices)
        job = await serve.prepare(
            services, record, model, lambda next_rid, ms: lower_chat(request, model, next_rid, seed, ms)
        )
        heading = Heading(
            serve.new_id("chatcmpl"),
            serve.now(),
            model.full_name,
            choices,
            choices,
            is_legacy=bool(request.functions),
            sends_ids=bool(request.return_token_ids),
        )
        if request.stream:
            await job.stream(ChatStream(heading, request.wants_usage), receive, send)
        else:
            await job.whole(ChatFold(heading), receive, send)
