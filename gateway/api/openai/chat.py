"""`POST /v1/chat/completions`."""

from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.extras import extras_of
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
        record.answer_id = serve.new_id("chatcmpl")
        heading = Heading(
            record.answer_id,
            serve.now(),
            model.full_name,
            choices,
            choices,
            is_legacy=bool(request.functions),
            sends_ids=bool(request.return_token_ids),
            extras=extras_of(request.x_mlxd, record),
        )
        if request.stream:
            encoder = ChatStream(heading, request.wants_usage)
            on_progress = encoder.progress if request.return_progress else None
            await job.stream(encoder, receive, send, on_progress=on_progress)
        else:
            await job.whole(ChatFold(heading), receive, send)
