"""Operations of the public API: its routes and their descriptions in the OpenAPI document."""

from copy import copy
from functools import cache
from typing import Any, Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api.batch_routes import BATCH_OPERATIONS
from gateway.api.compat import completion, infill, props
from gateway.api.compat import tokenize as tokens
from gateway.api.compat.native_completion import NO_ACTION, NativeCompletion
from gateway.api.dialect_routes import DIALECTS, generation, tokenization
from gateway.api.openai.request import NO_ACTION as CHAT_NO_ACTION
from gateway.api.openai.request import ChatCompletionRequest
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
OpenAI's chat completions, completions, embeddings, audio, Responses, files and batches, Anthropic's Messages and
message batches, Ollama's API, ranking and scores of texts, and a few routes of mlxd's own.

While mlxd has no API keys, clients on the loopback need none. Fields that are not named here are ignored and listed in
the header `x-mlxd-ignored`, but for those of other servers that would change an answer: these are a 400. Whole numbers
are written without a fraction. With the header `anthropic-version` errors have Anthropic's shape on every path. An
error after the first byte of a stream is an event of the stream. Paths below `/v1` are also served without it.
`/v1/responses` is served as a WebSocket too, which OpenAPI cannot describe; a handshake on any other path is a 426.
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
    tokenization(
        "/apply-template",
        on_services(tokens.apply_template),
        "Render the prompt of a chat as text, as llama.cpp's server does.",
        tokens.RenderedChat,
        ChatCompletionRequest,
        CHAT_NO_ACTION,
    ),
    generation(
        "/infill",
        on_services(infill.fill_middle),
        "Fill in the middle of a text, as llama.cpp's server does.",
        NativeCompletion,
        infill.InfillRequest,
        NO_ACTION,
        (NativeCompletion, ErrorBody),
    ),
    generation(
        "/completion",
        on_services(completion.complete),
        "Continue a text, in the form of llama.cpp's server.",
        NativeCompletion,
        completion.NativeRequest,
        NO_ACTION,
        (NativeCompletion, ErrorBody),
    ),
    Operation(
        "GET",
        "/v1/models",
        on_catalog(models.list_models),
        "List the models that the key may use.",
        models.ModelList,
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
OPERATIONS: Final[tuple[Operation, ...]] = (*DIALECTS, *BATCH_OPERATIONS, *_MLXD, *_HEALTH)
# The beginnings of all paths below `/v1`. Clients of llama.cpp's server use them without the version.
UNVERSIONED: Final = tuple(
    sorted(
        {
            each.path.removeprefix("/v1").partition("{")[0].rstrip("/")
            for each in OPERATIONS
            if each.path.startswith("/v1/")
        }
    )
)


def routes(parts: Parts) -> list[Route]:
    """Return the routes of all operations."""
    made: list[Route] = []
    for route, maker in _templates():
        made.append(copy(route))
        made[-1].app = made[-1].endpoint = maker(parts)
    return made


@cache
def _templates() -> list[tuple[Route, Maker]]:
    """Return routes with the makers of their endpoints. Paths are compiled once, because that takes milliseconds."""
    methods: dict[tuple[str, Maker], list[str]] = {}
    for operation in OPERATIONS:
        methods.setdefault((operation.routed_path, operation.maker), []).append(operation.method)
    return [(Route(path, maker, methods=names), maker) for (path, maker), names in methods.items()]
