"""`POST /v1/embeddings`."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import TEXT, RefusedField, known, shape, words
from gateway.api.common.serve import Vectors, respond_vectors
from gateway.api.openai.request import NO_ACTION, PROMPTS, TokenId
from gateway.errors import BadRequest, invalid_choice
from gateway.request.record import record_of
from gateway.services import Services
from protocol.checkpoint import EMBED
from protocol.to_worker import EmbedPrompt, Generate, Sampling

# Maximum number of inputs, as in OpenAI's API.
INPUTS_MAX: Final = 2048
_INPUTS: Final = PROMPTS | {"maxItems": INPUTS_MAX}
_QUERY: Final = ("query", "search_query")
_DOCUMENT: Final = ("document", "passage", "search_document")
# An input type changes an embedding only if the model has a prompt for it.
_INPUT_TYPES: Final = (*_QUERY, *_DOCUMENT, "classification", "clustering")
ENCODINGS: Final = ("float", "base64")
Truncate = Annotated[int, Meta(ge=-1, le=1 << 31)]


class EmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. `input` is one input or up to 2,048."""

    model: str = ""
    input: Annotated[str, shape(TEXT)] | Annotated[list[str | TokenId | list[TokenId]], shape(_INPUTS)]
    encoding_format: Annotated[str, words(*ENCODINGS)] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    # Type of the inputs. It selects which of the model's prompts precedes each text. The values are those of other
    # servers.
    input_type: Annotated[str, known(*_INPUT_TYPES)] | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    # Length in tokens to which inputs are truncated; -1 is the model's limit. This is vLLM's field.
    truncate_prompt_tokens: Truncate | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None


class Embedding(Struct, frozen=True):
    """One vector. `embedding` is a list of numbers, or little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


# Fields of llama.cpp, TEI, Jina, Voyage and vLLM that would change the vectors.
_REFUSED: Final = {
    "normalize": RefusedField("vectors are as the model's files say", (True,)),
    "embd_normalize": RefusedField("vectors are as the model's files say", (2,)),
    "late_chunking": RefusedField("", (False,)),
    "add_special_tokens": RefusedField("send token ids", (True,)),
    "truncate": RefusedField("set 'truncate_prompt_tokens'", (False, "NONE")),
    "output_dimension": RefusedField("set 'dimensions'"),
    **dict.fromkeys(
        ("embed_dtype", "output_dtype", "embedding_type"),
        RefusedField("set 'encoding_format'", ("float", "float32")),
    ),
}
_schema = Schema(EmbeddingsRequest, NO_ACTION, "input", refused=_REFUSED)


def decode_embeddings(body: bytes) -> tuple[EmbeddingsRequest, list[str]]:
    """Decode a request. Returns it with the names of unknown fields. Raises `BadRequest`."""
    request, unknown = _schema.decode(body)
    if request.encoding_format not in (None, *ENCODINGS):
        raise invalid_choice(request.encoding_format, ENCODINGS, "encoding_format")
    if request.input_type is not None and request.input_type not in _INPUT_TYPES:
        raise invalid_choice(request.input_type, _INPUT_TYPES, "input_type")
    return request, unknown


def inputs_of(request: EmbeddingsRequest) -> tuple[str | tuple[int, ...], ...]:
    """Return the inputs, each as text or token ids. Raises `BadRequest`."""
    given = request.input
    if isinstance(given, str):
        given = [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return (tuple(item for item in given if isinstance(item, int)),)
    if not given or len(given) > INPUTS_MAX:
        raise BadRequest(f"'input' has {len(given)} inputs; 1 to {INPUTS_MAX} are taken.", "input", "invalid_value")
    if len(kinds) > 1:
        raise BadRequest("'input' mixes texts, token ids and lists of them.", "input", "invalid_value")
    if any(not item for item in given):
        raise BadRequest("'input' holds an empty text or list.", "input", "invalid_value")
    return tuple(item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int))


def lower_embeddings(
    request: EmbeddingsRequest, inputs: tuple[str | tuple[int, ...], ...], rid: int, deadline_ms: int
) -> Generate:
    """Make the worker's request for the vectors of `inputs`."""
    prompt = EmbedPrompt(
        inputs,
        prompt_name=request.prompt_name or "",
        is_query=request.input_type in _QUERY,
        is_document=request.input_type in _DOCUMENT,
        dimensions=request.dimensions or 0,
        truncate=request.truncate_prompt_tokens or 0,
    )
    return Generate(
        rid,
        prompt,
        Sampling(),
        max_tokens=0,
        deadline_ms=deadline_ms,
        priority=request.priority or 0,
        want_progress=True,
    )


class Embeddings:
    """ASGI endpoint of embeddings."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_embeddings)
        model = serve.begin_reading(services, record, request.model, unknown)
        inputs = inputs_of(request)
        job = await serve.prepare(
            services, record, model, lambda next_rid, ms: lower_embeddings(request, inputs, next_rid(), ms), EMBED
        )
        is_base64 = request.encoding_format == "base64"
        await respond_vectors(job, len(inputs), lambda vectors: _render(vectors, model.name, is_base64), receive, send)


def _render(vectors: Vectors, model: str, is_base64: bool) -> bytes:
    """Encode an `EmbeddingList` vector by vector. Encoding all numbers together would take ten times the memory."""
    usage = EmbeddingUsage(vectors.prompt_tokens, vectors.prompt_tokens)
    empty = msgspec.json.encode(EmbeddingList([], model, usage))
    before, _, after = empty.partition(b"[]")
    value = vectors.base64 if is_base64 else vectors.numbers
    items = (msgspec.json.encode(Embedding(at, value(at))) for at in range(vectors.count))
    return before + b"[" + b",".join(items) + b"]" + after
