"""Scores of pairs of texts: `POST /v1/rerank` as in Jina, Cohere and TEI, and `POST /v1/score` as in vLLM."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import NULL, TEXT, RefusedField, case, shape
from gateway.api.common.serve import Vectors, respond_vectors
from gateway.errors import BadRequest, missing_parameter
from gateway.request.record import record_of
from gateway.services import Services
from protocol.checkpoint import RERANK
from protocol.to_worker import Generate, Sampling, ScorePrompt

DOCUMENTS_MAX: Final = 2048
NO_ACTION: Final = frozenset({"user"})
Truncate = Annotated[int, Meta(ge=-1, le=1 << 31)]
Text = Annotated[str, shape(TEXT)]


class RankedDocument(Struct, frozen=True):
    text: Text


class RerankRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/rerank`. Up to 2,048 `documents`, each a text or an object with one; or `texts` for TEI's answer."""

    hint: ClassVar = {"anyOf": [case(("documents",), texts=NULL), case(("texts",), documents=NULL)]}

    model: str = ""
    query: Text
    documents: Annotated[list[Text | RankedDocument], Meta(min_length=1, max_length=DOCUMENTS_MAX)] | None = None
    texts: Annotated[list[Text], Meta(min_length=1, max_length=DOCUMENTS_MAX)] | None = None
    # Whether each result has its text, and whether a pair that is too long is cut. These are TEI's fields.
    return_text: bool | None = None
    truncate: bool | None = None
    top_n: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    return_documents: bool | None = None
    # Length in tokens to which a document is cut. This is Cohere's field.
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    # Length in tokens to which a pair is cut at the end of its document; -1 is the model's own limit. This is vLLM's
    # field.
    truncate_prompt_tokens: Truncate | None = None
    # Description of the task, for models that were trained with such a description.
    instruction: Annotated[str, Meta(max_length=65_536)] | None = None


class RerankResult(Struct, frozen=True):
    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class RankedText(Struct, frozen=True):
    """A result in TEI's form."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class BilledUnits(Struct, frozen=True):
    search_units: int = 1


class RerankMeta(Struct, frozen=True):
    billed_units: BilledUnits = BilledUnits()


class ScoreUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class RerankList(Struct, frozen=True):
    """Results, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: ScoreUsage
    meta: RerankMeta = RerankMeta()
    object: str = "list"


class ScoreRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/score`. One text against each of a list, or two lists of equal length, pair by pair."""

    model: str = ""
    text_1: Text | Annotated[list[Text], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    text_2: Text | Annotated[list[Text], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    truncate_prompt_tokens: Truncate | None = None
    instruction: Annotated[str, Meta(max_length=65_536)] | None = None


class ScoredPair(Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreList(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[ScoredPair]
    usage: ScoreUsage
    object: str = "list"


_REFUSED: Final = {
    "raw_scores": RefusedField("scores are as the model's files say", (False,)),
    "truncation_direction": RefusedField("the end of a document is cut", ("right", "Right")),
}
_rerank = Schema(RerankRequest, NO_ACTION, "documents", refused=_REFUSED)
_score = Schema(ScoreRequest, NO_ACTION)


async def rerank(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /v1/rerank`."""
    request, unknown = await serve.read(services, record_of(scope), scope, receive, _rerank.decode)
    documents = _documents(request)
    prompt = ScorePrompt(
        (request.query,),
        documents,
        request.instruction or "",
        request.truncate_prompt_tokens or (-1 if request.truncate else 0),
        request.max_tokens_per_doc or 0,
        params=("query", "documents" if request.texts is None else "texts"),
    )
    job = await _job(services, scope, request.model, unknown, prompt)

    def render(vectors: Vectors) -> bytes:
        scores = [vectors.numbers(at)[0] for at in range(vectors.count)]
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: request.top_n or len(scores)]
        if request.texts is not None:
            ranked = [RankedText(at, scores[at], documents[at] if request.return_text else UNSET) for at in order]
            return msgspec.json.encode(ranked)
        results = [
            RerankResult(at, scores[at], RankedDocument(documents[at]) if request.return_documents else UNSET)
            for at in order
        ]
        usage = ScoreUsage(vectors.prompt_tokens, vectors.prompt_tokens)
        return msgspec.json.encode(RerankList(serve.new_id("rerank"), job.model.name, results, usage))

    await respond_vectors(job, len(documents), render, receive, send)


async def score(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /v1/score`."""
    request, unknown = await serve.read(services, record_of(scope), scope, receive, _score.decode)
    queries, documents = _texts(request.text_1), _texts(request.text_2)
    if len(queries) not in (1, len(documents)):
        message = f"'text_1' has {len(queries)} texts and 'text_2' {len(documents)}: one, or as many, are paired."
        raise BadRequest(message, "text_1", "invalid_value")
    truncate = request.truncate_prompt_tokens or 0
    prompt = ScorePrompt(queries, documents, request.instruction or "", truncate, params=("text_1", "text_2"))
    job = await _job(services, scope, request.model, unknown, prompt)

    def render(vectors: Vectors) -> bytes:
        data = [ScoredPair(at, vectors.numbers(at)[0]) for at in range(vectors.count)]
        usage = ScoreUsage(vectors.prompt_tokens, vectors.prompt_tokens)
        return msgspec.json.encode(ScoreList(serve.new_id("score"), serve.now(), job.model.name, data, usage))

    await respond_vectors(job, len(documents), render, receive, send)


async def _job(
    services: Services, scope: Scope, name: str, unknown: list[str], prompt: ScorePrompt
) -> serve.PreparedRequest:
    """Return the prepared request for the scores of `prompt`. Raises `ApiError`."""
    record = record_of(scope)
    model = serve.begin_reading(services, record, name, unknown)
    texts = ((prompt.params[0], prompt.queries), (prompt.params[1], prompt.documents))
    for param, each in texts:
        if not all(each):
            raise BadRequest(f"'{param}' holds an empty text.", param, "invalid_value")

    def lower(next_rid: Callable[[], int], deadline_ms: int) -> Generate:
        return Generate(next_rid(), prompt, Sampling(), max_tokens=0, deadline_ms=deadline_ms, want_progress=True)

    return await serve.prepare(services, record, model, lower, RERANK)


def _documents(request: RerankRequest) -> tuple[str, ...]:
    if request.texts is not None and request.documents is not None:
        raise BadRequest("'documents' and 'texts' exclude each other.", "texts", "invalid_value")
    given = request.documents if request.texts is None else request.texts
    if given is None:
        raise missing_parameter("documents")
    return tuple(each if isinstance(each, str) else each.text for each in given)


def _texts(given: str | list[Any]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
