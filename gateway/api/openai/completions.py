"""`POST /v1/completions`."""

from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.extras import extras_of
from gateway.api.openai.choices import Heading
from gateway.api.openai.completions_encoder import TextFold, TextStream
from gateway.api.openai.lowering import lower_completion
from gateway.api.openai.request import decode_completion
from gateway.request.record import record_of
from gateway.services import Services


class Completions:
    """ASGI endpoint of text completions, streamed or whole."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_completion)
        is_stream, sequences = bool(request.stream), request.sequences
        model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown, sequences)
        job = await serve.prepare(
            services,
            record,
            model,
            lambda next_rid, ms: lower_completion(request, model, next_rid, seed, ms),
            repeats=request.n or 1,
        )
        record.answer_id = serve.new_id("cmpl")
        heading = Heading(
            record.answer_id,
            serve.now(),
            model.full_name,
            len(job.generates),
            request.n or 1,
            sends_ids=bool(request.return_token_ids),
            extras=extras_of(request.x_mlxd, record),
        )
        if request.stream:
            encoder = TextStream(heading, request.wants_usage)
            on_progress = encoder.progress if request.return_progress else None
            await job.stream(encoder, receive, send, on_progress=on_progress)
        else:
            await job.whole(TextFold(heading), receive, send)
