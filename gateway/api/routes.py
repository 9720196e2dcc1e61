"""Operations of the public API: its routes and their descriptions in the OpenAPI document.

Operations of files and batches, in the dialects of OpenAI and Anthropic.

Operations of the dialects' APIs: OpenAI, audio, scores, decisions, Anthropic, Responses and Ollama.
"""

from copy import copy
from functools import cache, partial
from typing import Any, Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api.anthropic import request as anthropic
from gateway.api.anthropic import response as anthropic_out
from gateway.api.anthropic.endpoints import CountTokens, MessagesEndpoint
from gateway.api.anthropic.response import AnthropicErrorBody
from gateway.api.batches import files, openai_and_message_batches
from gateway.api.batches.batch_lines import MessageBatchResult
from gateway.api.batches.files import BINARY, DEFAULT_LIMIT, JSON_LINES, FileEndpoints
from gateway.api.batches.openai_and_message_batches import MessageBatches, OpenAIBatches
from gateway.api.compat import llama_cpp, ollama_models, scores
from gateway.api.compat import tokenize as tokens
from gateway.api.compat.llama_cpp import NO_ACTION, NativeCompletion
from gateway.api.decisions import openai as openai_decisions
from gateway.api.decisions import typesafe
from gateway.api.endpoint_makers import (
    Maker,
    Parts,
    on_batches,
    on_catalog,
    on_files,
    on_message_batches,
    on_responses,
    on_services,
    or_upstream,
    served,
)
from gateway.api.ollama import request as ollama
from gateway.api.ollama import response as ollama_out
from gateway.api.ollama.embed import Embed, EmbedRequest, EmbedResponse, OllamaEmbeddingsRequest, OneEmbedding
from gateway.api.ollama.endpoints import Chat, Complete, PullEndpoint
from gateway.api.openai import audio, embeddings
from gateway.api.openai import request as openai
from gateway.api.openai import response as openai_out
from gateway.api.openai.audio import SpeechEndpoint, Transcriptions
from gateway.api.openai.chat_and_completions import ChatCompletions, Completions
from gateway.api.openai.embeddings import Embeddings
from gateway.api.openai.request import NO_ACTION as CHAT_NO_ACTION
from gateway.api.openai.request import ChatCompletionRequest
from gateway.api.responses import request as responses
from gateway.api.responses import response as responses_out
from gateway.api.responses.endpoints import ITEMS_DEFAULT, ITEMS_MAX, Responses
from gateway.api.system import health, models, openapi
from gateway.api.system.openapi import ALWAYS, FORM, LINES, Operation, Parameter
from gateway.errors import ErrorBody
from gateway.http.bodies import send_body
from gateway.services import Services

_STORED: Final = (*ALWAYS, 400, 404, 503)
_SENT: Final = (*_STORED, 408, 413)
_IGNORED: Final = {"x-mlxd-ignored": "Unknown fields of the request, ignored."}
_TEXT: Final = {"type": "string"}


def _id(what: str) -> Parameter:
    return Parameter("id", "path", _TEXT | {"minLength": 1}, f"The id of a {what}.")


def _limit(default: int, most: int) -> Parameter:
    schema: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return Parameter("limit", "query", schema, "Most items in a page.")


_AFTER: Final = Parameter("after", "query", _TEXT, "The page starts after the item with this id.")
_files = on_files(FileEndpoints.upload_or_list)
_one_file = on_files(FileEndpoints.get_or_delete)
_FILES: Final = (
    Operation(
        "POST",
        "/v1/files",
        _files,
        "Upload the requests of a batch: a JSON object in each line.",
        files.FileObject,
        files.FileUpload,
        errors=_SENT,
        body_type=FORM,
        headers=_IGNORED,
    ),
    Operation(
        "GET",
        "/v1/files",
        _files,
        "List files.",
        files.FileList,
        errors=_STORED,
        parameters=(
            _AFTER,
            _limit(files.PAGE_MAX, files.PAGE_MAX),
            Parameter("order", "query", {"enum": ["asc", "desc"], "default": "desc"}, "`desc` is newest first."),
            Parameter("purpose", "query", _TEXT, f"List only files of this purpose: {' or '.join(files.PURPOSES)}."),
        ),
    ),
    Operation(
        "GET",
        "/v1/files/{id}",
        _one_file,
        "Get a file's description.",
        files.FileObject,
        errors=_STORED,
        parameters=(_id("file"),),
    ),
    Operation(
        "DELETE",
        "/v1/files/{id}",
        _one_file,
        "Delete a file.",
        files.DeletedFile,
        errors=_STORED,
        parameters=(_id("file"),),
    ),
    Operation(
        "GET",
        "/v1/files/{id}/content",
        on_files(FileEndpoints.content),
        "Get a file's content.",
        str,
        errors=_STORED,
        parameters=(_id("file"),),
        media_type=BINARY.decode(),
    ),
)
_batches = on_batches(OpenAIBatches.create_or_list)
_BATCHES: Final = (
    Operation(
        "POST",
        "/v1/batches",
        _batches,
        "Create a batch of an uploaded file. Its requests run while nothing else does.",
        openai_and_message_batches.OpenAIBatch,
        openai_and_message_batches.BatchRequest,
        errors=_SENT,
        headers=_IGNORED,
    ),
    Operation(
        "GET",
        "/v1/batches",
        _batches,
        "List batches.",
        openai_and_message_batches.BatchList,
        errors=_STORED,
        parameters=(_AFTER, _limit(DEFAULT_LIMIT, openai_and_message_batches.PAGE_MAX)),
    ),
    Operation(
        "GET",
        "/v1/batches/{id}",
        on_batches(OpenAIBatches.get),
        "Get a batch.",
        openai_and_message_batches.OpenAIBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    Operation(
        "POST",
        "/v1/batches/{id}/cancel",
        on_batches(OpenAIBatches.cancel),
        "Cancel a batch.",
        openai_and_message_batches.OpenAIBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
)
_message_batches = on_message_batches(MessageBatches.create_or_list)
_one_message_batch = on_message_batches(MessageBatches.get_or_delete)
_messages = partial(Operation, error=AnthropicErrorBody)
_MESSAGE_BATCHES: Final = (
    _messages(
        "POST",
        "/v1/messages/batches",
        _message_batches,
        "Create a batch of messages. Its requests run while nothing else does.",
        openai_and_message_batches.MessageBatch,
        openai_and_message_batches.MessageBatchRequest,
        errors=_SENT,
        headers=_IGNORED,
    ),
    _messages(
        "GET",
        "/v1/messages/batches",
        _message_batches,
        "List batches of messages.",
        openai_and_message_batches.MessageBatchList,
        errors=_STORED,
        parameters=(
            Parameter("after_id", "query", _TEXT, "The page starts after the batch with this id."),
            Parameter("before_id", "query", _TEXT, "The page ends before the batch with this id."),
            _limit(DEFAULT_LIMIT, openai_and_message_batches.MESSAGE_PAGE_MAX),
        ),
    ),
    _messages(
        "GET",
        "/v1/messages/batches/{id}",
        _one_message_batch,
        "Get a batch of messages.",
        openai_and_message_batches.MessageBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    _messages(
        "DELETE",
        "/v1/messages/batches/{id}",
        _one_message_batch,
        "Delete a batch of messages that has ended, with its results.",
        openai_and_message_batches.DeletedMessageBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    _messages(
        "POST",
        "/v1/messages/batches/{id}/cancel",
        on_message_batches(MessageBatches.cancel),
        "Cancel a batch of messages.",
        openai_and_message_batches.MessageBatch,
        errors=_STORED,
        parameters=(_id("batch"),),
    ),
    _messages(
        "GET",
        "/v1/messages/batches/{id}/results",
        on_message_batches(MessageBatches.results),
        "Get the results of a batch of messages that has ended: a JSON object in each line.",
        MessageBatchResult,
        errors=_STORED,
        parameters=(_id("batch"),),
        media_type=JSON_LINES.decode(),
    ),
)
BATCH_OPERATIONS: Final = (*_FILES, *_BATCHES, *_MESSAGE_BATCHES)


TOKENIZE: Final = (*ALWAYS, 400, 404, 408, 413, 503)
GENERATE: Final = (*TOKENIZE, 504)
IGNORED: Final = {"x-mlxd-ignored": "Unknown fields of the request, ignored."}
SEED: Final = {
    "x-mlxd-seed": "The seed that reproduces this answer.",
    "x-mlxd-relaxed": "Keywords of a schema that were not enforced on the answer; a video that was shown as images; "
    "`kv-bits-8` or `kv-bits-4` of a model with quantized KV; `sparse-prefill-K-of-N`, of a prompt's tokens.",
    "x-mlxd-truncated": "Turns and tokens that were left out of a prompt which did not fit, as `2;16000`.",
} | IGNORED
generation: Final = partial(Operation, "POST", errors=GENERATE, headers=SEED)
computation: Final = partial(Operation, "POST", errors=GENERATE, headers=IGNORED)
tokenization: Final = partial(Operation, "POST", errors=TOKENIZE, headers=IGNORED)

_OPENAI: Final = (
    generation(
        "/v1/chat/completions",
        or_upstream(ChatCompletions, "openai"),
        "Create a chat completion.",
        openai_out.ChatCompletion,
        openai.ChatCompletionRequest,
        openai.NO_ACTION,
        (openai_out.ChatChunk, ErrorBody),
    ),
    generation(
        "/v1/completions",
        or_upstream(Completions, "openai"),
        "Create a text completion.",
        openai_out.TextCompletion,
        openai.CompletionRequest,
        openai.NO_ACTION,
        (openai_out.TextCompletion, ErrorBody),
    ),
    computation(
        "/v1/embeddings",
        served(Embeddings),
        "Create embeddings of texts.",
        embeddings.EmbeddingList,
        embeddings.EmbeddingsRequest,
        openai.NO_ACTION,
    ),
)
_SUBTITLES: Final = {"text/plain": "Plain text, or subtitles as SRT.", "text/vtt": "Subtitles as WebVTT."}
_AUDIO: Final = (
    generation(
        "/v1/audio/transcriptions",
        lambda parts: Transcriptions(parts.services, is_translated=False),
        "Transcribe a clip of audio.",
        audio.Transcription,
        audio.TranscriptionRequest,
        audio.NO_ACTION,
        (audio.TranscriptDelta, audio.TranscriptDone, ErrorBody),
        body_type=FORM,
        media_types=_SUBTITLES,
    ),
    generation(
        "/v1/audio/translations",
        lambda parts: Transcriptions(parts.services, is_translated=True),
        "Translate a clip of audio to English text.",
        audio.Transcription,
        audio.TranslationRequest,
        audio.NO_ACTION,
        body_type=FORM,
        media_types=_SUBTITLES,
    ),
    generation(
        "/v1/audio/speech",
        served(SpeechEndpoint),
        "Speak a text.",
        str,
        audio.SpeechRequest,
        frozenset({"user"}),
        (audio.AudioDelta, audio.AudioDone, ErrorBody),
        media_type="audio/mpeg",
        media_types={kind.decode(): f"The file as {name}." for name, kind in audio.SPEECH_FORMATS.items()},
    ),
)
_DECISIONS: Final = (
    computation(
        "/v1/decisions",
        on_services(openai_decisions.decisions),
        "Answer questions about an input: predicates, choices and scores, each with its probabilities.",
        openai_decisions.DecisionAnswers,
        openai_decisions.DecisionRequest,
        openai_decisions.NO_ACTION,
    ),
    computation(
        "/v1/systemone",
        on_services(typesafe.system_one),
        "Answer questions about a state, as TypeSafe's System One API does.",
        typesafe.SystemOneAnswers,
        typesafe.SystemOneRequest,
        errors=(*(status for status in GENERATE if status != 400), typesafe.UNPROCESSABLE),
        error=typesafe.TypeSafeErrorBody,
    ),
)
_RANKED: Final = scores.RerankList | list[scores.RankedText]
_SCORES: Final = (
    *(
        computation(path, on_services(scores.rerank), summary, _RANKED, scores.RerankRequest, scores.NO_ACTION)
        for path, summary in (
            ("/v1/rerank", "Rank documents by a query."),
            ("/v2/rerank", "Rank documents, as `/v1/rerank` does."),
        )
    ),
    computation(
        "/v1/score",
        on_services(scores.score),
        "Score pairs of texts.",
        scores.ScoreList,
        scores.ScoreRequest,
        scores.NO_ACTION,
    ),
)
_ANTHROPIC: Final = (
    generation(
        "/v1/messages",
        or_upstream(MessagesEndpoint, "anthropic"),
        "Create a message (Anthropic Messages API).",
        anthropic_out.AnthropicMessage,
        anthropic.MessagesRequest,
        anthropic.NO_ACTION,
        (anthropic_out.Event,),
        error=anthropic_out.AnthropicErrorBody,
    ),
    tokenization(
        "/v1/messages/count_tokens",
        served(CountTokens),
        "Count the tokens of a conversation.",
        anthropic_out.AnthropicTokenCount,
        anthropic.CountRequest,
        anthropic.NO_ACTION,
        error=anthropic_out.AnthropicErrorBody,
    ),
)
_ID: Final = Parameter("id", "path", {"type": "string", "minLength": 1}, "The id of a response.")
_EVENTS_AFTER: Final = (
    Parameter("stream", "query", {"enum": ["true", "false"]}, "Stream the events of a background response."),
    Parameter("starting_after", "query", {"type": "integer", "minimum": 0}, "With `stream`: the client's last event."),
)
_ORDER: Final = {"enum": ["asc", "desc"], "default": "desc"}
_LIMIT: Final = {"type": "integer", "minimum": 1, "maximum": ITEMS_MAX, "default": ITEMS_DEFAULT}
_PAGE: Final = (
    Parameter("order", "query", _ORDER, "Order of the items: `desc` is newest first."),
    Parameter("after", "query", {"type": "string"}, "The page starts after the item with this id."),
    Parameter("limit", "query", _LIMIT, "Most items in a page."),
)
# GET and DELETE of /v1/responses/{id} share one function, and so one route, whose 405 answer lists both methods.
_one_response = on_responses(Responses.get_or_delete)
_stored = partial(Operation, errors=(*ALWAYS, 400, 404, 503))
_RESPONSES: Final = (
    generation(
        "/v1/responses",
        on_responses(Responses.create),
        "Create a response and store it.",
        responses_out.Response,
        responses.ResponsesRequest,
        responses.NO_ACTION,
        (responses_out.Event,),
        is_numbered=True,
    ),
    generation(
        "/v1/responses/compact",
        on_responses(Responses.compact),
        "Compact a conversation.",
        responses_out.CompactedResponse,
        responses.InputTokensRequest,
        responses.NO_ACTION,
    ),
    tokenization(
        "/v1/responses/input_tokens",
        on_responses(Responses.count),
        "Count the tokens of a request.",
        responses_out.InputTokenCount,
        responses.InputTokensRequest,
        responses.NO_ACTION,
    ),
    _stored(
        "GET",
        "/v1/responses/{id}",
        _one_response,
        "Get a response, or the events of a background response.",
        responses_out.Response,
        events=(responses_out.Event,),
        is_numbered=True,
        parameters=(_ID, *_EVENTS_AFTER),
    ),
    _stored(
        "DELETE",
        "/v1/responses/{id}",
        _one_response,
        "Delete a stored response.",
        responses_out.DeletedResponse,
        parameters=(_ID,),
    ),
    _stored(
        "POST",
        "/v1/responses/{id}/cancel",
        on_responses(Responses.cancel),
        "Cancel a response that is being generated.",
        responses_out.Response,
        parameters=(_ID,),
    ),
    _stored(
        "GET",
        "/v1/responses/{id}/input_items",
        on_responses(Responses.list_items),
        "List the input items of a response.",
        responses_out.ItemList,
        parameters=(_ID, *_PAGE),
    ),
)
_lines = partial(generation, error=ollama_out.ErrorLine, stream_type=LINES)
_embeds = partial(computation, error=ollama_out.ErrorLine)
_reads = partial(tokenization, error=ollama_out.ErrorLine)
_lists = partial(Operation, "GET", error=ollama_out.ErrorLine)


_OLLAMA: Final = (
    _lines(
        "/api/chat",
        served(Chat),
        "Chat, as Ollama does; streams by default.",
        ollama_out.ChatLine,
        ollama.OllamaChatRequest,
        events=(ollama_out.ChatLine, ollama_out.ErrorLine),
    ),
    _lines(
        "/api/generate",
        served(Complete),
        "Complete a prompt, as Ollama does; streams by default.",
        ollama_out.GenerateLine,
        ollama.GenerateRequest,
        events=(ollama_out.GenerateLine, ollama_out.ErrorLine),
    ),
    _embeds(
        "/api/embed",
        lambda parts: Embed(parts.services, is_old=False),
        "Embed texts, as Ollama does.",
        EmbedResponse,
        EmbedRequest,
    ),
    _embeds(
        "/api/embeddings",
        lambda parts: Embed(parts.services, is_old=True),
        "Embed a text in Ollama's older form.",
        OneEmbedding,
        OllamaEmbeddingsRequest,
    ),
    _reads(
        "/api/pull",
        lambda parts: PullEndpoint(parts.services, parts.downloads),
        "Download a model (admin keys only).",
        ollama_out.PullLine,
        ollama.PullRequest,
        ollama.PULL_NO_ACTION,
        (ollama_out.PullLine, ollama_out.ErrorLine),
        stream_type=LINES,
    ),
    _reads(
        "/api/show",
        on_catalog(ollama_models.show_model),
        "Get a model in Ollama's form.",
        ollama_models.ShowResponse,
        ollama.ShowRequest,
        ollama.SHOW_NO_ACTION,
    ),
    _lists("/api/tags", on_catalog(ollama_models.list_tags), "List the models in Ollama's form.", ollama_models.Tags),
    _lists(
        "/api/ps",
        on_catalog(ollama_models.list_running),
        "List the loaded models in Ollama's form.",
        ollama_models.RunningModels,
    ),
    _lists(
        "/api/version",
        on_services(ollama_models.ollama_version),
        "Get the version of Ollama's API.",
        ollama_models.OllamaVersion,
    ),
)
DIALECTS: Final = (*_OPENAI, *_AUDIO, *_SCORES, *_DECISIONS, *_ANTHROPIC, *_RESPONSES, *_OLLAMA)


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
        on_services(llama_cpp.fill_middle),
        "Fill in the middle of a text, as llama.cpp's server does.",
        NativeCompletion,
        llama_cpp.InfillRequest,
        NO_ACTION,
        (NativeCompletion, ErrorBody),
    ),
    generation(
        "/completion",
        on_services(llama_cpp.complete),
        "Continue a text, in the form of llama.cpp's server.",
        NativeCompletion,
        llama_cpp.NativeRequest,
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
        on_catalog(llama_cpp.model_props),
        "Get a model's properties in the form of llama.cpp's server.",
        llama_cpp.Props,
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
        parameters=(
            Parameter(
                "names", "query", {"enum": [health.VLLM_NAMES]}, "With `vllm`, list the series under vLLM's names too."
            ),
        ),
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
