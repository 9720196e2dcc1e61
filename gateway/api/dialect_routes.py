"""Operations of the dialects' APIs: OpenAI, audio, scores, decisions, Anthropic, Responses and Ollama."""

from functools import partial
from typing import Final

from gateway.api.anthropic import request as anthropic
from gateway.api.anthropic import response as anthropic_out
from gateway.api.anthropic.endpoints import CountTokens, MessagesEndpoint
from gateway.api.compat import ollama_models, scores
from gateway.api.decisions import openai as openai_decisions
from gateway.api.decisions import typesafe
from gateway.api.ollama import request as ollama
from gateway.api.ollama import response as ollama_out
from gateway.api.ollama.embed import Embed, EmbedRequest, EmbedResponse, OllamaEmbeddingsRequest, OneEmbedding
from gateway.api.ollama.endpoints import Chat, Complete
from gateway.api.ollama.pull_stream import PullEndpoint
from gateway.api.openai import embeddings, speech, transcript_forms, transcriptions
from gateway.api.openai import request as openai
from gateway.api.openai import response as openai_out
from gateway.api.openai.chat import ChatCompletions
from gateway.api.openai.completions import Completions
from gateway.api.openai.embeddings import Embeddings
from gateway.api.openai.speech import SpeechEndpoint
from gateway.api.openai.transcriptions import Transcriptions
from gateway.api.parts import on_catalog, on_responses, on_services, or_upstream, served
from gateway.api.responses import request as responses
from gateway.api.responses import response as responses_out
from gateway.api.responses.endpoints import ITEMS_DEFAULT, ITEMS_MAX, Responses
from gateway.api.system.openapi import ALWAYS, FORM, LINES, Operation, Parameter
from gateway.errors import ErrorBody

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
        transcript_forms.Transcription,
        transcriptions.TranscriptionRequest,
        transcriptions.NO_ACTION,
        (transcriptions.TranscriptDelta, transcriptions.TranscriptDone, ErrorBody),
        body_type=FORM,
        media_types=_SUBTITLES,
    ),
    generation(
        "/v1/audio/translations",
        lambda parts: Transcriptions(parts.services, is_translated=True),
        "Translate a clip of audio to English text.",
        transcript_forms.Transcription,
        transcriptions.TranslationRequest,
        transcriptions.NO_ACTION,
        body_type=FORM,
        media_types=_SUBTITLES,
    ),
    generation(
        "/v1/audio/speech",
        served(SpeechEndpoint),
        "Speak a text.",
        str,
        speech.SpeechRequest,
        frozenset({"user"}),
        (speech.AudioDelta, speech.AudioDone, ErrorBody),
        media_type="audio/mpeg",
        media_types={kind.decode(): f"The file as {name}." for name, kind in speech.FORMATS.items()},
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
