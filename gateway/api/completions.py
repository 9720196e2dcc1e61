"""`POST /v1/completions`."""

from starlette.types import Receive, Scope, Send

from gateway.api import serve
from gateway.api.choices import Heading
from gateway.api.completions_encoder import TextFold, TextStream
from gateway.http import read_body, record_of
from gateway.schemas.lowering import lower_completion
from gateway.schemas.openai import decode_completion
from gateway.services import Services


class Completions:
    """An ASGI endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        body = await read_body(scope, receive, services.config.server.max_body_bytes)
        request, unknown = decode_completion(body)
        is_stream, sequences = bool(request.stream), request.sequences
        model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown, sequences)
        generates = lower_completion(request, model, services.link.next_rid, seed, serve.deadline_ms(services))
        heading = Heading(serve.new_id("cmpl"), serve.now(), model.name, len(generates), request.n or 1)
        job = serve.Job(services, record, model, generates)
        if request.stream:
            await job.stream(TextStream(heading, request.wants_usage), receive, send)
        else:
            await job.whole(TextFold(heading), receive, send)
