"""Operations of the public API for the OpenAPI document. A test compares them with the routes."""

from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api.anthropic import request as anthropic
from gateway.api.anthropic import response as anthropic_out
from gateway.api.compat import scores
from gateway.api.compat.infill import NO_ACTION as INFILL_NO_ACTION
from gateway.api.compat.infill import InfillRequest, InfillResponse
from gateway.api.compat.lm_studio import ModelsV0, ModelsV1
from gateway.api.compat.ollama_models import RunningModels, ShowResponse, Tags, VersionEndpoint
from gateway.api.compat.props import Props
from gateway.api.compat.tokenize import DetokenizedText, DetokenizeRequest, TokenizedText, TokenizeRequest
from gateway.api.ollama import request as ollama
from gateway.api.ollama import response as ollama_out
from gateway.api.ollama.embed import EmbedRequest, EmbedResponse, OneEmbedding
from gateway.api.ollama.embed import OllamaEmbeddingsRequest as OllamaEmbeddingsRequest
from gateway.api.ollama.refusals import REFUSED
from gateway.api.openai import embeddings, speech, transcript_forms, transcriptions
from gateway.api.openai import request as openai
from gateway.api.openai import response as openai_out
from gateway.api.responses import request as responses
from gateway.api.responses import response as responses_out
from gateway.api.responses.endpoints import ITEMS_DEFAULT, ITEMS_MAX
from gateway.api.system import openapi
from gateway.api.system.health import AboutEndpoint, Health
from gateway.api.system.models import ModelCard, ModelList
from gateway.api.system.openapi import Operation, Parameter
from gateway.errors import ErrorBody
from gateway.http.exchange import send_body

# Any request can meet these.
_ALWAYS: Final = (401, 403, 421, 429, 431, 500)
_BODY: Final = (400, 408, 413)
_TOKENIZE: Final = (*_ALWAYS, *_BODY, 404, 503)
_GENERATE: Final = (*_TOKENIZE, 504)
_KEPT: Final = (*_ALWAYS, 400, 404, 503)
_IGNORED: Final = {"x-mlxd-ignored": "Unknown fields of the request, ignored."}
_SEED: Final = {
    "x-mlxd-seed": "The seed that reproduces this answer.",
    "x-mlxd-relaxed": "Keywords of a schema that were not enforced on the answer; a video that was shown as images; "
    "`kv-bits-8` or `kv-bits-4` of a model with quantized KV; `sparse-prefill-K-of-N`, of a prompt's tokens.",
    "x-mlxd-truncated": "Turns and tokens that were left out of a prompt which did not fit, as `2;16000`.",
} | _IGNORED
_RESPONSE_ID: Final = Parameter("id", "path", {"type": "string", "minLength": 1}, "The id of a response.")
_MODEL_ID: Final = Parameter(
    "id", "path", {"type": "string", "minLength": 1}, "A model's name or alias; it may contain slashes."
)
_ONE_MODEL: Final = Parameter(
    "model",
    "query",
    {"type": "string"},
    "A model's name or alias; without it the default model, or the only one that the key may use.",
)
_DIGEST: Final = Parameter("digest", "path", {"type": "string", "minLength": 1}, "The digest of a blob.")
_EVENTS_AFTER: Final = (
    Parameter("stream", "query", {"enum": ["true", "false"]}, "Stream the events of a background response."),
    Parameter("starting_after", "query", {"type": "integer", "minimum": 0}, "With `stream`: the client's last event."),
)
_PAGE: Final = (
    _RESPONSE_ID,
    Parameter(
        "order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "Order of the items: `desc` is newest first."
    ),
    Parameter("after", "query", {"type": "string"}, "The page starts after the item with this id."),
    Parameter(
        "limit",
        "query",
        {"type": "integer", "minimum": 1, "maximum": ITEMS_MAX, "default": ITEMS_DEFAULT},
        "Most items in a page.",
    ),
)

DESCRIPTION: Final = """\
OpenAI's chat completions, completions, embeddings, audio and Responses, Anthropic's Messages, Ollama's API, ranking and
scores of texts, and a few routes of mlxd's own.

While mlxd has no API keys, clients on the loopback need none. Fields that are not named here are ignored and listed in
the header `x-mlxd-ignored`, but for those of other servers that would change an answer: these are a 400. Whole numbers
are written without a fraction. With the header `anthropic-version` errors have Anthropic's shape on every path. An
error after the first byte of a stream is an event of the stream.
"""


_OPENAI: Final = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "Create a chat completion.",
        openai_out.ChatCompletion,
        ErrorBody,
        _GENERATE,
        openai.ChatCompletionRequest,
        openai.NO_ACTION,
        (openai_out.ChatChunk, ErrorBody),
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/completions",
        "Create a text completion.",
        openai_out.TextCompletion,
        ErrorBody,
        _GENERATE,
        openai.CompletionRequest,
        openai.NO_ACTION,
        (openai_out.TextCompletion, ErrorBody),
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "Create embeddings of texts.",
        embeddings.EmbeddingList,
        ErrorBody,
        _GENERATE,
        embeddings.EmbeddingsRequest,
        openai.NO_ACTION,
        headers=_IGNORED,
    ),
)
_AUDIO: Final = (
    Operation(
        "POST",
        "/v1/audio/transcriptions",
        "Transcribe a clip of audio.",
        transcript_forms.Transcription,
        ErrorBody,
        _GENERATE,
        transcriptions.TranscriptionRequest,
        transcriptions.NO_ACTION,
        (transcriptions.TranscriptDelta, transcriptions.TranscriptDone, ErrorBody),
        body_type=openapi.FORM,
        media_types={"text/plain": "Plain text, or subtitles as SRT.", "text/vtt": "Subtitles as WebVTT."},
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/audio/translations",
        "Translate a clip of audio to English text.",
        transcript_forms.Transcription,
        ErrorBody,
        _GENERATE,
        transcriptions.TranslationRequest,
        transcriptions.NO_ACTION,
        body_type=openapi.FORM,
        media_types={"text/plain": "Plain text, or subtitles as SRT.", "text/vtt": "Subtitles as WebVTT."},
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/audio/speech",
        "Speak a text.",
        str,
        ErrorBody,
        _GENERATE,
        speech.SpeechRequest,
        frozenset({"user"}),
        (speech.AudioDelta, speech.AudioDone, ErrorBody),
        media_type="audio/mpeg",
        media_types={kind.decode(): f"The file as {name}." for name, kind in speech.FORMATS.items()},
        headers=_SEED,
    ),
)
_RANKED: Final = scores.RerankList | list[scores.RankedText]
_SCORES: Final = tuple(
    Operation("POST", path, summary, answer, ErrorBody, _GENERATE, request, frozenset({"user"}), headers=_IGNORED)
    for path, summary, answer, request in (
        ("/v1/rerank", "Rank documents by a query.", _RANKED, scores.RerankRequest),
        ("/rerank", "Rank documents, as `/v1/rerank` does.", _RANKED, scores.RerankRequest),
        ("/v2/rerank", "Rank documents, as `/v1/rerank` does.", _RANKED, scores.RerankRequest),
        ("/v1/score", "Score pairs of texts.", scores.ScoreList, scores.ScoreRequest),
        ("/score", "Score pairs of texts, as `/v1/score` does.", scores.ScoreList, scores.ScoreRequest),
    )
)
_ANTHROPIC: Final = (
    Operation(
        "POST",
        "/v1/messages",
        "Create a message (Anthropic Messages API).",
        anthropic_out.AnthropicMessage,
        anthropic_out.AnthropicErrorBody,
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
        anthropic_out.AnthropicTokenCount,
        anthropic_out.AnthropicErrorBody,
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
        "Create a response and store it.",
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
        "Compact a conversation.",
        responses_out.CompactedResponse,
        ErrorBody,
        _GENERATE,
        responses.InputTokensRequest,
        responses.NO_ACTION,
        headers=_SEED,
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "Count the tokens of a request.",
        responses_out.InputTokenCount,
        ErrorBody,
        _TOKENIZE,
        responses.InputTokensRequest,
        responses.NO_ACTION,
        headers=_IGNORED,
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        "Get a response, or the events of a background response.",
        responses_out.Response,
        ErrorBody,
        _KEPT,
        events=(responses_out.Event,),
        is_numbered=True,
        parameters=(_RESPONSE_ID, *_EVENTS_AFTER),
    ),
    *(
        Operation(method, path, summary, answer, ErrorBody, _KEPT, parameters=parameters)
        for method, path, summary, answer, parameters in (
            (
                "DELETE",
                "/v1/responses/{id}",
                "Delete a stored response.",
                responses_out.DeletedResponse,
                (_RESPONSE_ID,),
            ),
            (
                "POST",
                "/v1/responses/{id}/cancel",
                "Cancel a response that is being generated.",
                responses_out.Response,
                (_RESPONSE_ID,),
            ),
            (
                "GET",
                "/v1/responses/{id}/input_items",
                "List the input items of a response.",
                responses_out.ItemList,
                _PAGE,
            ),
        )
    ),
)
_OLLAMA: Final = (
    *(
        Operation(
            "POST",
            path,
            summary,
            line,
            ollama_out.ErrorLine,
            _GENERATE,
            body,
            events=(line, ollama_out.ErrorLine),
            stream_type=openapi.LINES,
            headers=_SEED,
        )
        for path, summary, line, body in (
            ("/api/chat", "Chat, as Ollama does; streams by default.", ollama_out.ChatLine, ollama.OllamaChatRequest),
            (
                "/api/generate",
                "Complete a prompt, as Ollama does; streams by default.",
                ollama_out.GenerateLine,
                ollama.GenerateRequest,
            ),
        )
    ),
    *(
        Operation("POST", path, summary, answer, ollama_out.ErrorLine, _GENERATE, body, headers=_IGNORED)
        for path, summary, answer, body in (
            ("/api/embed", "Embed texts, as Ollama does.", EmbedResponse, EmbedRequest),
            ("/api/embeddings", "Embed a text in Ollama's older form.", OneEmbedding, OllamaEmbeddingsRequest),
        )
    ),
    Operation(
        "POST",
        "/api/pull",
        "Download a model (admin keys only).",
        ollama_out.PullLine,
        ollama_out.ErrorLine,
        _TOKENIZE,
        ollama.PullRequest,
        ollama.PULL_NO_ACTION,
        (ollama_out.PullLine, ollama_out.ErrorLine),
        stream_type=openapi.LINES,
        headers=_IGNORED,
    ),
    Operation(
        "POST",
        "/api/show",
        "Get a model in Ollama's form.",
        ShowResponse,
        ollama_out.ErrorLine,
        _TOKENIZE,
        ollama.ShowRequest,
        ollama.SHOW_NO_ACTION,
        headers=_IGNORED,
    ),
    Operation("GET", "/api/tags", "List the models in Ollama's form.", Tags, ollama_out.ErrorLine, _ALWAYS),
    Operation(
        "GET", "/api/ps", "List the loaded models in Ollama's form.", RunningModels, ollama_out.ErrorLine, _ALWAYS
    ),
    Operation(
        "GET", "/api/version", "Get the version of Ollama's API.", VersionEndpoint, ollama_out.ErrorLine, _ALWAYS
    ),
    *(
        Operation(
            method,
            path,
            f"Not served. {advice}",
            ollama_out.ErrorLine,
            ollama_out.ErrorLine,
            (*_ALWAYS, 501),
            parameters=(_DIGEST,) if "{digest}" in path else (),
        )
        for method, path, advice in REFUSED
        if method != "HEAD"
    ),
)
_MLXD: Final = (
    Operation(
        "POST",
        "/tokenize",
        "Tokenize a prompt.",
        TokenizedText,
        ErrorBody,
        _TOKENIZE,
        TokenizeRequest,
        headers=_IGNORED,
    ),
    Operation(
        "POST",
        "/detokenize",
        "Decode tokens into text.",
        DetokenizedText,
        ErrorBody,
        _TOKENIZE,
        DetokenizeRequest,
        headers=_IGNORED,
    ),
    Operation(
        "POST",
        "/infill",
        "Fill in the middle of a text, as llama.cpp's server does.",
        InfillResponse,
        ErrorBody,
        _GENERATE,
        InfillRequest,
        INFILL_NO_ACTION,
        (InfillResponse, ErrorBody),
        headers=_SEED,
    ),
    Operation("GET", "/v1/models", "List the models that the key may use.", ModelList, ErrorBody, _ALWAYS),
    Operation("GET", "/v1/models/{id}", "Get a model.", ModelCard, ErrorBody, (*_ALWAYS, 404), parameters=(_MODEL_ID,)),
    Operation("GET", "/models", "List the models, as `/v1/models` does.", ModelList, ErrorBody, _ALWAYS),
    Operation(
        "GET",
        "/props",
        "Get a model's properties in the form of llama.cpp's server.",
        Props,
        ErrorBody,
        (*_ALWAYS, 400, 404),
        parameters=(_ONE_MODEL,),
    ),
    Operation("GET", "/api/v0/models", "List the models in LM Studio's older form.", ModelsV0, ErrorBody, _ALWAYS),
    Operation("GET", "/api/v1/models", "List the models in LM Studio's form.", ModelsV1, ErrorBody, _ALWAYS),
    Operation("GET", "/", "Get the name, version and entry points of this server.", AboutEndpoint, ErrorBody, _ALWAYS),
    Operation("GET", "/openapi.json", "Get this OpenAPI document.", dict[str, Any], ErrorBody, _ALWAYS),
    Operation(
        "GET",
        "/metrics",
        "Get the metrics in Prometheus' text format. Once there are keys, one of role `metrics` or `admin` is needed.",
        str,
        ErrorBody,
        _ALWAYS,
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
    Operation("GET", path, summary, Health, ErrorBody, (403, 421, 431, 500), needs_key=False, also=also)
    for path, summary, also in (
        ("/livez", "Liveness: whether the daemon answers.", {}),
        ("/readyz", "Readiness: whether the daemon accepts requests.", {503: "Not ready."}),
    )
) + tuple(
    Operation(
        "GET",
        path,
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
OPERATIONS: Final = (*_OPENAI, *_AUDIO, *_SCORES, *_ANTHROPIC, *_RESPONSES, *_OLLAMA, *_MLXD, *_HEALTH)


class OpenApiDocument:
    """ASGI endpoint of the OpenAPI document, built at its first request."""

    def __init__(self) -> None:
        self._body: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._body is None:
            document = openapi.document(OPERATIONS, version=protocol.__version__, description=DESCRIPTION)
            self._body = msgspec.json.encode(document)
        await send_body(send, 200, self._body)
