"""Every operation of the public API, as the published document tells of it. A test holds it against the routes."""

from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api import openapi
from gateway.api.anthropic import request as anthropic
from gateway.api.anthropic import response as anthropic_out
from gateway.api.health import About, Health
from gateway.api.models import ModelCard, ModelList
from gateway.api.openai import request as openai
from gateway.api.openai import response as openai_out
from gateway.api.openapi import Operation, Parameter
from gateway.api.responses import request as responses
from gateway.api.responses import response as responses_out
from gateway.api.responses.endpoints import ITEMS_DEFAULT, ITEMS_MAX
from gateway.api.tokenize import DetokenizeRequest, Text, TokenizeRequest, Tokens
from gateway.errors import ErrorBody
from gateway.http.exchange import send_body

# Any request can meet these.
_ALWAYS: Final = (401, 403, 421, 429, 431, 500)
_BODY: Final = (400, 408, 413)
_TOKENIZE: Final = (*_ALWAYS, *_BODY, 404, 503)
_GENERATE: Final = (*_TOKENIZE, 504)
_KEPT: Final = (*_ALWAYS, 400, 404, 503)
_IGNORED: Final = {"x-mlxd-ignored": "Fields of the request that did nothing."}
_SEED: Final = {
    "x-mlxd-seed": "With this seed the same answer can be had again.",
    "x-mlxd-relaxed": "Keywords of a schema that the answer is not held to.",
} | _IGNORED
_RESPONSE_ID: Final = Parameter("id", "path", {"type": "string", "minLength": 1}, "The id of a response.")
_MODEL_ID: Final = Parameter(
    "id", "path", {"type": "string", "minLength": 1}, "A name or an alias, maybe with slashes."
)
_PAGE: Final = (
    _RESPONSE_ID,
    Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "The newest first, or last."),
    Parameter("after", "query", {"type": "string"}, "The id of the item before the first of the page."),
    Parameter(
        "limit",
        "query",
        {"type": "integer", "minimum": 1, "maximum": ITEMS_MAX, "default": ITEMS_DEFAULT},
        "How many items at most.",
    ),
)

DESCRIPTION: Final = """\
OpenAI's chat completions, completions and Responses, Anthropic's Messages, and a few routes of mlxd's own.

Where mlxd has no key yet, it asks for none on the loopback. Fields that are not named here are ignored, and told in
the header `x-mlxd-ignored`. Whole numbers are written without a fraction. With the header `anthropic-version` errors
have Anthropic's shape on every path. An error after the first byte of a stream is an event of the stream.
"""


_OPENAI: Final = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation.",
        openai_out.ChatCompletion,
        ErrorBody,
        _GENERATE,
        openai.ChatRequest,
        openai.NO_ACTION,
        (openai_out.ChatChunk, ErrorBody),
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Go on with a text.",
        openai_out.TextCompletion,
        ErrorBody,
        _GENERATE,
        openai.CompletionRequest,
        openai.NO_ACTION,
        (openai_out.TextCompletion, ErrorBody),
        headers=_SEED,
    ),
)
_ANTHROPIC: Final = (
    Operation(
        "POST",
        "/v1/messages",
        "Answer a conversation, in Anthropic's words.",
        anthropic_out.Message,
        anthropic_out.ErrorBody,
        _GENERATE,
        anthropic.MessagesRequest,
        anthropic.NO_ACTION,
        (anthropic_out.Event,),
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        anthropic_out.TokenCount,
        anthropic_out.ErrorBody,
        _TOKENIZE,
        anthropic.CountRequest,
        anthropic.NO_ACTION,
        headers=_IGNORED,
    ),
)
_RESPONSES: Final = (
    Operation(
        "POST",
        "/v1/responses",
        "Answer, and keep the answer.",
        responses_out.Response,
        ErrorBody,
        _GENERATE,
        responses.ResponsesRequest,
        responses.NO_ACTION,
        (responses_out.Event,),
        is_numbered=True,
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/responses/compact",
        "Make a conversation short.",
        responses_out.Compacted,
        ErrorBody,
        _GENERATE,
        responses.CountRequest,
        responses.NO_ACTION,
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Count the tokens of a request.",
        responses_out.TokenCount,
        ErrorBody,
        _TOKENIZE,
        responses.CountRequest,
        responses.NO_ACTION,
        headers=_IGNORED,
    ),
    *(
        Operation(method, path, summary, answer, ErrorBody, _KEPT, parameters=parameters)
        for method, path, summary, answer, parameters in (
            ("GET", "/v1/responses/{id}", "A response that was kept.", responses_out.Response, (_RESPONSE_ID,)),
            ("DELETE", "/v1/responses/{id}", "Forget a response.", responses_out.Deleted, (_RESPONSE_ID,)),
            ("POST", "/v1/responses/{id}/cancel", "End a response now.", responses_out.Response, (_RESPONSE_ID,)),
            ("GET", "/v1/responses/{id}/input_items", "What a response answers.", responses_out.ItemList, _PAGE),
        )
    ),
)
_MLXD: Final = (
    Operation(
        "POST", "/tokenize", "The tokens of a prompt.", Tokens, ErrorBody, _TOKENIZE, TokenizeRequest, headers=_IGNORED
    ),
    Operation(
        "POST", "/detokenize", "The text of tokens.", Text, ErrorBody, _TOKENIZE, DetokenizeRequest, headers=_IGNORED
    ),
    Operation("GET", "/v1/models", "The models that the key may use.", ModelList, ErrorBody, _ALWAYS),
    Operation("GET", "/v1/models/{id}", "One model.", ModelCard, ErrorBody, (*_ALWAYS, 404), parameters=(_MODEL_ID,)),
    Operation("GET", "/", "What this is.", About, ErrorBody, _ALWAYS),
    Operation("GET", "/openapi.json", "This document.", dict[str, Any], ErrorBody, _ALWAYS),
    Operation(
        "GET",
        "/metrics",
        "Prometheus' text format. Once there are keys, one of role `metrics` or `admin` is needed.",
        str,
        ErrorBody,
        _ALWAYS,
        needs_key=None,
        media_type="text/plain",
    ),
)
_DEEP: Final = (
    Parameter("deep", "query", {"enum": ["0", "1"], "default": "0"}, "Ask each loaded model for a token."),
    Parameter("model", "query", {"type": "string"}, "Ask this one only."),
)
_HEALTH: Final = tuple(
    Operation("GET", path, summary, Health, ErrorBody, (403, 421, 431, 500), needs_key=False, also=also)
    for path, summary, also in (
        ("/livez", "Whether the daemon answers.", {}),
        ("/readyz", "Whether it may be asked.", {503: "Not ready."}),
    )
) + tuple(
    Operation(
        "GET",
        path,
        "What is wrong. With `deep`, for which an admin key is needed, `models` tells what each model did.",
        Health,
        ErrorBody,
        (400, 401, 403, 404, 421, 431, 500),
        needs_key=False,
        parameters=_DEEP,
        also={503: "Nothing can be served, or a model that was asked did not answer."},
    )
    for path in ("/health", "/healthz")
)
OPERATIONS: Final = (*_OPENAI, *_ANTHROPIC, *_RESPONSES, *_MLXD, *_HEALTH)


class Document:
    """An ASGI endpoint. The document is made when it is first asked for."""

    def __init__(self) -> None:
        self._body: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._body is None:
            made = openapi.document(OPERATIONS, version=protocol.__version__, description=DESCRIPTION)
            self._body = msgspec.json.encode(made)
        await send_body(send, 200, self._body)
