"""Operations of the public API: its routes and their descriptions in the OpenAPI document."""

from functools import cache
from typing import Any, Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api.compat import infill, lm_studio, props
from gateway.api.compat import tokenize as tokens
from gateway.api.dialect_routes import DIALECTS, generation, tokenization
from gateway.api.parts import Maker, Parts, on_catalog, on_services, served
from gateway.api.system import health, models, openapi
from gateway.api.system.openapi import ALWAYS, Operation, Parameter
from gateway.errors import ErrorBody
from gateway.http.exchange import send_body
from gateway.services import Services

_TEXT: Final = {"type": "string"}
_MODEL_ID: Final = Parameter(
    "id",
    "path",
    _TEXT | {"minLength": 1},
    "A model's name or alias; it may contain slashes.",
    has_slashes=True,
)
_ONE_MODEL: Final = Parameter(
    "model",
    "query",
    _TEXT,
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


async def _openapi(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, _document())


@cache
def _document() -> bytes:
    document = openapi.document(OPERATIONS, version=protocol.__version__, description=DESCRIPTION)
    return msgspec.json.encode(document)


_MLXD: Final = (
    tokenization(
        "/tokenize", on_services(tokens.tokenize), "Tokenize a prompt.", tokens.TokenizedText, tokens.TokenizeRequest
    ),
    tokenization(
        "/detokenize",
        on_services(tokens.detokenize),
        "Decode tokens into text.",
        tokens.DetokenizedText,
        tokens.DetokenizeRequest,
    ),
    generation(
        "/infill",
        on_services(infill.fill_middle),
        "Fill in the middle of a text, as llama.cpp's server does.",
        infill.InfillResponse,
        infill.InfillRequest,
        infill.NO_ACTION,
        (infill.InfillResponse, ErrorBody),
    ),
    *(
        Operation("GET", path, on_catalog(handler), summary, answer)
        for path, handler, summary, answer in (
            ("/v1/models", models.list_models, "List the models that the key may use.", models.ModelList),
            ("/models", models.list_models, "List the models, as `/v1/models` does.", models.ModelList),
            ("/api/v0/models", lm_studio.list_v0, "List the models in LM Studio's older form.", lm_studio.ModelsV0),
            ("/api/v1/models", lm_studio.list_v1, "List the models in LM Studio's form.", lm_studio.ModelsV1),
        )
    ),
    Operation(
        "GET",
        "/v1/models/{id}",
        on_catalog(models.get_model),
        "Get a model.",
        models.ModelCard,
        errors=(*ALWAYS, 404),
        parameters=(_MODEL_ID,),
    ),
    Operation(
        "GET",
        "/props",
        on_catalog(props.model_props),
        "Get a model's properties in the form of llama.cpp's server.",
        props.Props,
        errors=(*ALWAYS, 400, 404),
        parameters=(_ONE_MODEL,),
    ),
    Operation(
        "GET",
        "/",
        on_services(health.root),
        "Get the name, version and entry points of this server.",
        health.AboutServer,
    ),
    Operation("GET", "/openapi.json", on_services(_openapi), "Get this OpenAPI document.", dict[str, Any]),
    Operation(
        "GET",
        "/metrics",
        served(health.Scrape),
        "Get the metrics in Prometheus' text format. Once there are keys, one of role `metrics` or `admin` is needed.",
        str,
        needs_key=None,
        media_type="text/plain",
    ),
)
_DEEP: Final = (
    Parameter(
        "deep", "query", {"enum": ["0", "1"], "default": "0"}, "With 1, generate a token with each loaded model."
    ),
    Parameter("model", "query", _TEXT, "Probe only this model."),
)
_HEALTH: Final = (
    *(
        Operation(
            "GET",
            path,
            on_services(handler),
            summary,
            health.Health,
            errors=(403, 421, 431, 500),
            needs_key=False,
            also=also,
        )
        for path, handler, summary, also in (
            ("/livez", health.live, "Liveness: whether the daemon answers.", {}),
            ("/readyz", health.ready, "Readiness: whether the daemon accepts requests.", {503: "Not ready."}),
        )
    ),
    *(
        Operation(
            "GET",
            path,
            on_services(health.health),
            "Health and the reasons of problems. With `deep` (admin keys only), `models` has each model's result.",
            health.Health,
            errors=(400, 401, 403, 404, 421, 431, 500),
            needs_key=False,
            parameters=_DEEP,
            also={503: "Nothing can be served, or a probed model did not answer."},
        )
        for path in ("/health", "/healthz")
    ),
)
OPERATIONS: Final[tuple[Operation, ...]] = (*DIALECTS, *_MLXD, *_HEALTH)


def routes(parts: Parts) -> list[Route]:
    """Return the routes of all operations."""
    methods: dict[tuple[str, Maker], list[str]] = {}
    for operation in OPERATIONS:
        methods.setdefault((operation.routed_path, operation.maker), []).append(operation.method)
    return [Route(path, maker(parts), methods=names) for (path, maker), names in methods.items()]
