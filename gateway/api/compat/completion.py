"""`POST /completion`: continue a text, in the own form of llama.cpp's server."""

from collections.abc import Callable
from typing import Annotated

from msgspec import Meta
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.doc_hints import TEXT, shape
from gateway.api.common.refused_fields import REFUSED_FIELDS
from gateway.api.compat.native_completion import NO_ACTION, NativeEncoder
from gateway.api.openai.events import check_progress
from gateway.api.openai.lowering import lower_texts
from gateway.api.openai.request import SamplingFields, TokenId
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from gateway.request.record import record_of
from gateway.services import Services
from protocol.prompts import TextPrompt, TokensPrompt
from protocol.to_worker import Generate


class NativeRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of `POST /completion`. With `n_predict` 0, the request only fills the prefix cache."""

    prompt: Annotated[str, shape(TEXT)] | Annotated[list[TokenId], Meta(min_length=1)]
    return_progress: bool | None = None


_completion = Schema(NativeRequest, NO_ACTION, refused=REFUSED_FIELDS)


async def complete(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /completion`."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, _completion.decode)
    if request.n not in (None, 1):
        raise BadRequest("'n' is 1 in this form: ask '/v1/completions' for more.", "n", "invalid_value")
    if not request.prompt:
        raise BadRequest("'prompt' is empty.", "prompt", "invalid_value")
    is_stream = bool(request.stream)
    check_progress(request.return_progress, is_stream=is_stream)
    model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown)
    job = await serve.prepare(services, record, model, lambda next_rid, ms: _lower(request, model, next_rid, seed, ms))
    encoder = NativeEncoder(model.full_name)
    if is_stream:
        await job.stream(encoder, receive, send, on_progress=encoder.progress if request.return_progress else None)
    else:
        await job.whole(encoder, receive, send)


def _lower(
    request: NativeRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int
) -> list[Generate]:
    given = request.prompt
    prompt = TextPrompt(given) if isinstance(given, str) else TokensPrompt(tuple(given))
    return lower_texts(request, model, [prompt], next_rid, seed, request.token_limit, deadline_ms)
