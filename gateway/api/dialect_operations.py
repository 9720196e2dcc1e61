"""Operations of the dialects' APIs: OpenAI, audio, scores, Anthropic, Responses and Ollama."""

from typing import Final

from starlette.types import ASGIApp

from gateway.api.anthropic import request as anthropic
from gateway.api.anthropic import response as anthropic_out
from gateway.api.anthropic.endpoints import CountTokens, MessagesEndpoint
from gateway.api.compat import scores
from gateway.api.compat.ollama_models import (
    ListRunning,
    ListTags,
    OllamaVersion,
    RunningModels,
    ShowModel,
    ShowResponse,
    Tags,
    VersionEndpoint,
)
from gateway.api.compat.scores import Rerank, ScorePairs
from gateway.api.ollama import request as ollama
from gateway.api.ollama import response as ollama_out
from gateway.api.ollama.embed import Embed, EmbedRequest, EmbedResponse, OneEmbedding
from gateway.api.ollama.embed import OllamaEmbeddingsRequest as OllamaEmbeddingsRequest
from gateway.api.ollama.endpoints import Chat, Complete
from gateway.api.ollama.pull_stream import PullEndpoint
from gateway.api.ollama.refusals import REFUSED, Refusal
from gateway.api.openai import embeddings, speech, transcript_forms, transcriptions
from gateway.api.openai import request as openai
from gateway.api.openai import response as openai_out
from gateway.api.openai.chat import ChatCompletions
from gateway.api.openai.completions import Completions
from gateway.api.openai.embeddings import Embeddings
from gateway.api.openai.speech import SpeechEndpoint
from gateway.api.openai.transcriptions import Transcriptions
from gateway.api.parts import Maker, Parts, listed, or_upstream, served
from gateway.api.responses import request as responses
from gateway.api.responses import response as responses_out
from gateway.api.responses.endpoints import ITEMS_DEFAULT, ITEMS_MAX
from gateway.api.system import openapi
from gateway.api.system.openapi import Operation, Parameter
from gateway.errors import ErrorBody

# Any request can meet these.
ALWAYS: Final = (401, 403, 421, 429, 431, 500)
_BODY: Final = (400, 408, 413)
TOKENIZE: Final = (*ALWAYS, *_BODY, 404, 503)
GENERATE: Final = (*TOKENIZE, 504)
_KEPT: Final = (*ALWAYS, 400, 404, 503)
IGNORED: Final = {"x-mlxd-ignored": "Unknown fields of the request, ignored."}
SEED: Final = {
    "x-mlxd-seed": "The seed that reproduces this answer.",
    "x-mlxd-relaxed": "Keywords of a schema that were not enforced on the answer; a video that was shown as images; "
    "`kv-bits-8` or `kv-bits-4` of a model with quantized KV; `sparse-prefill-K-of-N`, of a prompt's tokens.",
    "x-mlxd-truncated": "Turns and tokens that were left out of a prompt which did not fit, as `2;16000`.",
} | IGNORED
_RESPONSE_ID: Final = Parameter("id", "path", {"type": "string", "minLength": 1}, "The id of a response.")
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


def _one_response(parts: Parts) -> ASGIApp:
    return parts.responses.one


def _items(parts: Parts) -> ASGIApp:
    return parts.responses.items


def _embed(*, is_old: bool) -> Maker:
    return lambda parts: Embed(parts.services, is_old=is_old)


def _refusal(advice: str) -> Maker:
    return lambda _: Refusal(advice)


_OPENAI: Final = (
    Operation(
        "POST",
        "/v1/chat/completions",
        or_upstream(ChatCompletions, "openai"),
        "Create a chat completion.",
        openai_out.ChatCompletion,
        ErrorBody,
        GENERATE,
        openai.ChatCompletionRequest,
        openai.NO_ACTION,
        (openai_out.ChatChunk, ErrorBody),
        headers=SEED,
    ),
    Operation(
        "POST",
        "/v1/completions",
        or_upstream(Completions, "openai"),
        "Create a text completion.",
        openai_out.TextCompletion,
        ErrorBody,
        GENERATE,
        openai.CompletionRequest,
        openai.NO_ACTION,
        (openai_out.TextCompletion, ErrorBody),
        headers=SEED,
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        served(Embeddings),
        "Create embeddings of texts.",
        embeddings.EmbeddingList,
        ErrorBody,
        GENERATE,
        embeddings.EmbeddingsRequest,
        openai.NO_ACTION,
        headers=IGNORED,
    ),
)
_AUDIO: Final = (
    Operation(
        "POST",
        "/v1/audio/transcriptions",
        lambda parts: Transcriptions(parts.services, is_translated=False),
        "Transcribe a clip of audio.",
        transcript_forms.Transcription,
        ErrorBody,
        GENERATE,
        transcriptions.TranscriptionRequest,
        transcriptions.NO_ACTION,
        (transcriptions.TranscriptDelta, transcriptions.TranscriptDone, ErrorBody),
        body_type=openapi.FORM,
        media_types={"text/plain": "Plain text, or subtitles as SRT.", "text/vtt": "Subtitles as WebVTT."},
        headers=SEED,
    ),
    Operation(
        "POST",
        "/v1/audio/translations",
        lambda parts: Transcriptions(parts.services, is_translated=True),
        "Translate a clip of audio to English text.",
        transcript_forms.Transcription,
        ErrorBody,
        GENERATE,
        transcriptions.TranslationRequest,
        transcriptions.NO_ACTION,
        body_type=openapi.FORM,
        media_types={"text/plain": "Plain text, or subtitles as SRT.", "text/vtt": "Subtitles as WebVTT."},
        headers=SEED,
    ),
    Operation(
        "POST",
        "/v1/audio/speech",
        served(SpeechEndpoint),
        "Speak a text.",
        str,
        ErrorBody,
        GENERATE,
        speech.SpeechRequest,
        frozenset({"user"}),
        (speech.AudioDelta, speech.AudioDone, ErrorBody),
        media_type="audio/mpeg",
        media_types={kind.decode(): f"The file as {name}." for name, kind in speech.FORMATS.items()},
        headers=SEED,
    ),
)
_RANKED: Final = scores.RerankList | list[scores.RankedText]
_SCORES: Final = tuple(
    Operation(
        "POST",
        path,
        served(endpoint),
        summary,
        answer,
        ErrorBody,
        GENERATE,
        request,
        frozenset({"user"}),
        headers=IGNORED,
    )
    for path, endpoint, summary, answer, request in (
        ("/v1/rerank", Rerank, "Rank documents by a query.", _RANKED, scores.RerankRequest),
        ("/rerank", Rerank, "Rank documents, as `/v1/rerank` does.", _RANKED, scores.RerankRequest),
        ("/v2/rerank", Rerank, "Rank documents, as `/v1/rerank` does.", _RANKED, scores.RerankRequest),
        ("/v1/score", ScorePairs, "Score pairs of texts.", scores.ScoreList, scores.ScoreRequest),
        ("/score", ScorePairs, "Score pairs of texts, as `/v1/score` does.", scores.ScoreList, scores.ScoreRequest),
    )
)
_ANTHROPIC: Final = (
    Operation(
        "POST",
        "/v1/messages",
        or_upstream(MessagesEndpoint, "anthropic"),
        "Create a message (Anthropic Messages API).",
        anthropic_out.AnthropicMessage,
        anthropic_out.AnthropicErrorBody,
        GENERATE,
        anthropic.MessagesRequest,
        anthropic.NO_ACTION,
        (anthropic_out.Event,),
        headers=SEED,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        served(CountTokens),
        "Count the tokens of a conversation.",
        anthropic_out.AnthropicTokenCount,
        anthropic_out.AnthropicErrorBody,
        TOKENIZE,
        anthropic.CountRequest,
        anthropic.NO_ACTION,
        headers=IGNORED,
    ),
)
_RESPONSES: Final = (
    Operation(
        "POST",
        "/v1/responses",
        lambda parts: parts.responses.create,
        "Create a response and store it.",
        responses_out.Response,
        ErrorBody,
        GENERATE,
        responses.ResponsesRequest,
        responses.NO_ACTION,
        (responses_out.Event,),
        is_numbered=True,
        headers=SEED,
    ),
    Operation(
        "POST",
        "/v1/responses/compact",
        lambda parts: parts.responses.compact,
        "Compact a conversation.",
        responses_out.CompactedResponse,
        ErrorBody,
        GENERATE,
        responses.InputTokensRequest,
        responses.NO_ACTION,
        headers=SEED,
    ),
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        lambda parts: parts.responses.count,
        "Count the tokens of a request.",
        responses_out.InputTokenCount,
        ErrorBody,
        TOKENIZE,
        responses.InputTokensRequest,
        responses.NO_ACTION,
        headers=IGNORED,
    ),
    Operation(
        "GET",
        "/v1/responses/{id}",
        _one_response,
        "Get a response, or the events of a background response.",
        responses_out.Response,
        ErrorBody,
        _KEPT,
        events=(responses_out.Event,),
        is_numbered=True,
        parameters=(_RESPONSE_ID, *_EVENTS_AFTER),
    ),
    *(
        Operation(method, path, endpoint, summary, answer, ErrorBody, _KEPT, parameters=parameters)
        for method, path, endpoint, summary, answer, parameters in (
            (
                "DELETE",
                "/v1/responses/{id}",
                _one_response,
                "Delete a stored response.",
                responses_out.DeletedResponse,
                (_RESPONSE_ID,),
            ),
            (
                "POST",
                "/v1/responses/{id}/cancel",
                _one_response,
                "Cancel a response that is being generated.",
                responses_out.Response,
                (_RESPONSE_ID,),
            ),
            (
                "GET",
                "/v1/responses/{id}/input_items",
                _items,
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
            served(endpoint),
            summary,
            line,
            ollama_out.ErrorLine,
            GENERATE,
            body,
            events=(line, ollama_out.ErrorLine),
            stream_type=openapi.LINES,
            headers=SEED,
        )
        for path, endpoint, summary, line, body in (
            (
                "/api/chat",
                Chat,
                "Chat, as Ollama does; streams by default.",
                ollama_out.ChatLine,
                ollama.OllamaChatRequest,
            ),
            (
                "/api/generate",
                Complete,
                "Complete a prompt, as Ollama does; streams by default.",
                ollama_out.GenerateLine,
                ollama.GenerateRequest,
            ),
        )
    ),
    *(
        Operation("POST", path, endpoint, summary, answer, ollama_out.ErrorLine, GENERATE, body, headers=IGNORED)
        for path, endpoint, summary, answer, body in (
            (
                "/api/embed",
                _embed(is_old=False),
                "Embed texts, as Ollama does.",
                EmbedResponse,
                EmbedRequest,
            ),
            (
                "/api/embeddings",
                _embed(is_old=True),
                "Embed a text in Ollama's older form.",
                OneEmbedding,
                OllamaEmbeddingsRequest,
            ),
        )
    ),
    Operation(
        "POST",
        "/api/pull",
        lambda parts: PullEndpoint(parts.services, parts.downloads),
        "Download a model (admin keys only).",
        ollama_out.PullLine,
        ollama_out.ErrorLine,
        TOKENIZE,
        ollama.PullRequest,
        ollama.PULL_NO_ACTION,
        (ollama_out.PullLine, ollama_out.ErrorLine),
        stream_type=openapi.LINES,
        headers=IGNORED,
    ),
    Operation(
        "POST",
        "/api/show",
        lambda parts: ShowModel(parts.services, parts.catalog),
        "Get a model in Ollama's form.",
        ShowResponse,
        ollama_out.ErrorLine,
        TOKENIZE,
        ollama.ShowRequest,
        ollama.SHOW_NO_ACTION,
        headers=IGNORED,
    ),
    Operation(
        "GET", "/api/tags", listed(ListTags), "List the models in Ollama's form.", Tags, ollama_out.ErrorLine, ALWAYS
    ),
    Operation(
        "GET",
        "/api/ps",
        lambda parts: ListRunning(parts.services, parts.catalog),
        "List the loaded models in Ollama's form.",
        RunningModels,
        ollama_out.ErrorLine,
        ALWAYS,
    ),
    Operation(
        "GET",
        "/api/version",
        lambda _: OllamaVersion(),
        "Get the version of Ollama's API.",
        VersionEndpoint,
        ollama_out.ErrorLine,
        ALWAYS,
    ),
    *(
        Operation(
            method,
            path,
            _refusal(advice),
            f"Not served. {advice}",
            ollama_out.ErrorLine,
            ollama_out.ErrorLine,
            (*ALWAYS, 501),
            parameters=(_DIGEST,) if "{digest}" in path else (),
        )
        for method, path, advice in REFUSED
    ),
)
DIALECTS: Final = (*_OPENAI, *_AUDIO, *_SCORES, *_ANTHROPIC, *_RESPONSES, *_OLLAMA)
