"""Operations of the public API: its routes, and what the OpenAPI document says of them."""

from typing import Any, Final

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import protocol
from gateway.api.compat.infill import NO_ACTION as INFILL_NO_ACTION
from gateway.api.compat.infill import FillMiddle, InfillRequest, InfillResponse
from gateway.api.compat.lm_studio import ListV0, ListV1, ModelsV0, ModelsV1
from gateway.api.compat.props import ModelProps, Props
from gateway.api.compat.tokenize import (
    DetokenizedText,
    DetokenizeIds,
    DetokenizeRequest,
    TokenizedText,
    TokenizeRequest,
    TokenizeText,
)
from gateway.api.dialect_operations import ALWAYS, DIALECTS, GENERATE, IGNORED, SEED, TOKENIZE
from gateway.api.parts import Maker, Parts, listed, served
from gateway.api.system import openapi
from gateway.api.system.health import (
    AboutEndpoint,
    Health,
    HealthResponse,
    LiveEndpoint,
    Readiness,
    Root,
    Scrape,
)
from gateway.api.system.models import ModelCard, ModelList, Models, OneModel
from gateway.api.system.openapi import Operation, Parameter
from gateway.errors import ErrorBody
from gateway.http.exchange import send_body

_MODEL_ID: Final = Parameter(
    "id",
    "path",
    {"type": "string", "minLength": 1},
    "A model's name or alias; it may contain slashes.",
    has_slashes=True,
)
_ONE_MODEL: Final = Parameter(
    "model",
    "query",
    {"type": "string"},
    "A model's name or alias; without it the default model, or the only one that the key may use.",
)

DESCRIPTION: Final = """\
OpenAI's chat completions, completions, embeddings, audio and Responses, Anthropic's Messages, Ollama's API, ranking and
scores of texts, and a few routes of mlxd's own.

While mlxd has no API keys, clients on the loopback need none. Fields that are not named here are ignored and listed in
the header `x-mlxd-ignored`, but for those of other servers that would change an answer: these are a 400. Whole numbers
are written without a fraction. With the header `anthropic-version` errors have Anthropic's shape on every path. An
error after the first byte of a stream is an event of the stream.
"""


def _live(_: Parts) -> ASGIApp:
    return LiveEndpoint()


def _one_model(parts: Parts) -> ASGIApp:
    return OneModel(parts.catalog, Models(parts.catalog))


_MLXD: Final = (
    Operation(
        "POST",
        "/tokenize",
        served(TokenizeText),
        "Tokenize a prompt.",
        TokenizedText,
        ErrorBody,
        TOKENIZE,
        TokenizeRequest,
        headers=IGNORED,
    ),
    Operation(
        "POST",
        "/detokenize",
        served(DetokenizeIds),
        "Decode tokens into text.",
        DetokenizedText,
        ErrorBody,
        TOKENIZE,
        DetokenizeRequest,
        headers=IGNORED,
    ),
    Operation(
        "POST",
        "/infill",
        served(FillMiddle),
        "Fill in the middle of a text, as llama.cpp's server does.",
        InfillResponse,
        ErrorBody,
        GENERATE,
        InfillRequest,
        INFILL_NO_ACTION,
        (InfillResponse, ErrorBody),
        headers=SEED,
    ),
    Operation(
        "GET", "/v1/models", listed(Models), "List the models that the key may use.", ModelList, ErrorBody, ALWAYS
    ),
    Operation(
        "GET",
        "/v1/models/{id}",
        _one_model,
        "Get a model.",
        ModelCard,
        ErrorBody,
        (*ALWAYS, 404),
        parameters=(_MODEL_ID,),
    ),
    Operation("GET", "/models", listed(Models), "List the models, as `/v1/models` does.", ModelList, ErrorBody, ALWAYS),
    Operation(
        "GET",
        "/props",
        lambda parts: ModelProps(parts.services, parts.catalog),
        "Get a model's properties in the form of llama.cpp's server.",
        Props,
        ErrorBody,
        (*ALWAYS, 400, 404),
        parameters=(_ONE_MODEL,),
    ),
    Operation(
        "GET",
        "/api/v0/models",
        listed(ListV0),
        "List the models in LM Studio's older form.",
        ModelsV0,
        ErrorBody,
        ALWAYS,
    ),
    Operation(
        "GET", "/api/v1/models", listed(ListV1), "List the models in LM Studio's form.", ModelsV1, ErrorBody, ALWAYS
    ),
    Operation(
        "GET",
        "/",
        served(Root),
        "Get the name, version and entry points of this server.",
        AboutEndpoint,
        ErrorBody,
        ALWAYS,
    ),
    Operation(
        "GET",
        "/openapi.json",
        lambda _: OpenApiDocument(),
        "Get this OpenAPI document.",
        dict[str, Any],
        ErrorBody,
        ALWAYS,
    ),
    Operation(
        "GET",
        "/metrics",
        served(Scrape),
        "Get the metrics in Prometheus' text format. Once there are keys, one of role `metrics` or `admin` is needed.",
        str,
        ErrorBody,
        ALWAYS,
        needs_key=None,
        media_type="text/plain",
    ),
)
_DEEP: Final = (
    Parameter(
        "deep", "query", {"enum": ["0", "1"], "default": "0"}, "With 1, generate a token with each loaded model."
    ),
    Parameter("model", "query", {"type": "string"}, "Probe only this model."),
)
_HEALTH: Final = tuple(
    Operation("GET", path, endpoint, summary, Health, ErrorBody, (403, 421, 431, 500), needs_key=False, also=also)
    for path, endpoint, summary, also in (
        ("/livez", _live, "Liveness: whether the daemon answers.", {}),
        ("/readyz", served(Readiness), "Readiness: whether the daemon accepts requests.", {503: "Not ready."}),
    )
) + tuple(
    Operation(
        "GET",
        path,
        served(HealthResponse),
        "Health and the reasons of problems. With `deep` (admin keys only), `models` has each model's result.",
        Health,
        ErrorBody,
        (400, 401, 403, 404, 421, 431, 500),
        needs_key=False,
        parameters=_DEEP,
        also={503: "Nothing can be served, or a probed model did not answer."},
    )
    for path in ("/health", "/healthz")
)
OPERATIONS: Final[tuple[Operation, ...]] = (*DIALECTS, *_MLXD, *_HEALTH)


def routes(parts: Parts) -> list[Route]:
    """The routes of all operations."""
    methods: dict[tuple[str, Maker], list[str]] = {}
    for one in OPERATIONS:
        methods.setdefault((one.routed_path, one.maker), []).append(one.method)
    return [Route(path, maker(parts), methods=names) for (path, maker), names in methods.items()]


class OpenApiDocument:
    """ASGI endpoint of the OpenAPI document, built at its first request."""

    def __init__(self) -> None:
        self._body: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._body is None:
            document = openapi.document(OPERATIONS, version=protocol.__version__, description=DESCRIPTION)
            self._body = msgspec.json.encode(document)
        await send_body(send, 200, self._body)
