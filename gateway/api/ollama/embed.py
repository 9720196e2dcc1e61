"""`POST /api/embed` and its older form, `POST /api/embeddings`."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.serve import Vectors, respond_vectors
from gateway.api.ollama.endpoints import load_or_unload
from gateway.api.ollama.request import KeepAlive, OptionsField, is_zero, read_options
from gateway.api.ollama.response import nanoseconds
from gateway.errors import BadRequest
from gateway.http.bodies import send_body
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from protocol.checkpoint import EMBED
from protocol.to_worker import EmbedPrompt, Generate, Sampling

INPUTS_MAX: Final = 2048
# This value truncates inputs to the model's limit.
_TO_CONTEXT: Final = -1

_encode: Final = msgspec.json.Encoder().encode


class EmbedFields(Struct, frozen=True, kw_only=True):
    """Fields of both forms. `truncate` defaults to true, as in Ollama; if it is false, too long an input is a 400."""

    model: str = ""
    options: OptionsField | None = None
    keep_alive: KeepAlive | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class EmbedRequest(EmbedFields, frozen=True, kw_only=True):
    """`POST /api/embed`. Without an input it loads the model, or unloads it if `keep_alive` is 0."""

    input: str | list[str] | None = None


class OllamaEmbeddingsRequest(EmbedFields, frozen=True, kw_only=True):
    """`POST /api/embeddings`. Without a prompt it loads the model, or unloads it if `keep_alive` is 0."""

    prompt: str | None = None


class EmbedResponse(Struct, frozen=True):
    """Vectors of all inputs. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(Struct, frozen=True):
    """Vector of a prompt."""

    embedding: list[float]


_embed: Final = Schema(EmbedRequest)
_embeddings: Final = Schema(OllamaEmbeddingsRequest)


class Embed:
    """ASGI endpoint of embeddings, in the newer form or, with `is_old`, in the older one."""

    def __init__(self, services: Services, *, is_old: bool) -> None:
        self._services = services
        self._is_old = is_old

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, self._decode)
        model = serve.begin_reading(services, record, request.model, ignored)
        name, inputs = request.model or model.name, _inputs(request)
        if not inputs:
            await load_or_unload(services, record, model, receive, is_last=is_zero(request.keep_alive))
            await send_body(send, 200, self._render(Vectors(b"", 0, 0, []), name, record), record.headers)
            return
        job = await serve.prepare(
            services, record, model, lambda next_rid, ms: _lower(request, inputs, next_rid(), ms), EMBED
        )
        await respond_vectors(job, len(inputs), lambda vectors: self._render(vectors, name, record), receive, send)

    def _decode(self, body: bytes) -> tuple[EmbedRequest | OllamaEmbeddingsRequest, list[str]]:
        request, unknown = _embeddings.decode(body) if self._is_old else _embed.decode(body)
        _, ignored = read_options(request.options)
        return request, unknown + ignored + (["keep_alive"] if request.keep_alive is not None else [])

    def _render(self, vectors: Vectors, model: str, record: RequestRecord) -> bytes:
        """Encode the answer vector by vector. Encoding all numbers together would take ten times the memory."""
        rows = [_encode(vectors.numbers(at)) for at in range(vectors.count)]
        if self._is_old:
            return _encode(OneEmbedding([])).replace(b"[]", rows[0] if rows else b"[]")
        total, load = record.clock() - record.started, record.phases.load
        empty = _encode(EmbedResponse(model, [], nanoseconds(total), nanoseconds(load), vectors.prompt_tokens))
        # Quotes inside a name are escaped, so only the key itself can match.
        before, key, after = empty.partition(b'"embeddings":[')
        return before + key + b",".join(rows) + after


def _inputs(request: EmbedRequest | OllamaEmbeddingsRequest) -> tuple[str, ...]:
    """Return the texts to embed. There are none if the request only loads or unloads the model. Raises `BadRequest`."""
    given = request.input if isinstance(request, EmbedRequest) else request.prompt
    if isinstance(given, str) or given is None:
        return (given,) if given else ()
    if len(given) > INPUTS_MAX:
        raise BadRequest(f"'input' has {len(given)} inputs; at most {INPUTS_MAX} are taken.", "input", "invalid_value")
    if not all(given):
        raise BadRequest("'input' holds an empty text.", "input", "invalid_value")
    return tuple(given)


def _lower(request: EmbedFields, inputs: tuple[str, ...], rid: int, deadline_ms: int) -> Generate:
    truncate = 0 if request.truncate is False else _TO_CONTEXT
    prompt = EmbedPrompt(inputs, dimensions=request.dimensions or 0, truncate=truncate)
    return Generate(rid, prompt, Sampling(), max_tokens=0, deadline_ms=deadline_ms, want_progress=True)
