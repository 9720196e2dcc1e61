"""Endpoints in the own form of llama.cpp's server: `/completion`, `/infill` and `/props`.

Answers in the own form of llama.cpp's server, of `/completion` and `/infill`.

`POST /completion`: continue a text, in the own form of llama.cpp's server.

`POST /infill`: fill in the middle of a text, as in llama.cpp's server.

`GET /props`: the properties of a model that clients of llama.cpp's server read.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

import protocol
from gateway.api.common import serve
from gateway.api.common.catalog import Catalog
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import REFUSED_FIELDS, TEXT, shape
from gateway.api.openai.lowering import lower_texts
from gateway.api.openai.request import SamplingFields, TokenId
from gateway.api.openai.response import EventEncoder, PromptProgress, check_progress, event
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from gateway.http.bodies import send_body
from gateway.request.record import record_of
from gateway.services import Services
from protocol.from_worker import Delta, Finish, Progress, Usage
from protocol.to_worker import Generate, Infill, TextPrompt, TokensPrompt

# Fields for llama.cpp's cache, slots and truncation. They are not needed: mlxd caches every prefix, and answers a
# prompt that is too long with a 400.
NO_ACTION: Final = frozenset({"cache_prompt", "id_slot", "n_keep"})
_EMPTY: Final = Usage(0, 0, 0)


class Timings(Struct, frozen=True):
    """Numbers of tokens and milliseconds for the prompt and for the output."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class NativeCompletion(Struct, frozen=True, kw_only=True):
    """A piece of the text, or all of it. The last has `stop` true, and the counts and timings."""

    content: str
    stop: bool
    model: str
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class NativeEncoder(EventEncoder):
    """Encoder of deltas as llama.cpp's stream events, or as one whole answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._texts: list[str] = []
        self._end = Delta(0, finish=Finish.STOP)

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        text = self._text(deltas)
        return event(NativeCompletion(content=text, stop=False, model=self._model)) if text else b""

    def add(self, deltas: Sequence[Delta]) -> None:
        self._texts.append(self._text(deltas))

    def progress(self, progress: Progress) -> bytes:
        """Encode the progress of a prefill as an event without text."""
        done = PromptProgress.of(progress)
        return event(NativeCompletion(content="", stop=False, model=self._model, prompt_progress=done))

    def end(self) -> bytes:
        return event(self._last(""))

    def result(self) -> bytes:
        return msgspec.json.encode(self._last("".join(self._texts)))

    def _text(self, deltas: Sequence[Delta]) -> str:
        """Return the text of these deltas. If they contain the last delta, record the end."""
        for delta in deltas:
            if delta.finish is not None:
                self._end = delta
        return "".join(delta.text for delta in deltas)

    def _last(self, text: str) -> NativeCompletion:
        usage, stop = self._end.usage or _EMPTY, self._end.stop
        is_cut = self._end.finish is Finish.LENGTH
        predicted = usage.completion
        evaluated = usage.prompt - usage.cached
        return NativeCompletion(
            content=text,
            stop=True,
            model=self._model,
            stop_type="limit" if is_cut else "word" if stop else "eos",
            stopping_word=stop,
            tokens_predicted=predicted,
            tokens_evaluated=usage.prompt,
            tokens_cached=usage.cached,
            truncated=False,
            timings=Timings(
                evaluated,
                usage.prefill_ms,
                _rate(evaluated, usage.prefill_ms),
                predicted,
                usage.decode_ms,
                _rate(predicted, usage.decode_ms),
            ),
        )


def _rate(count: int, ms: float) -> float:
    return count / ms * 1000 if ms > 0 else 0.0


class NativeRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of `POST /completion`. With `n_predict` 0, the request only fills the prefix cache."""

    prompt: Annotated[str, shape(TEXT)] | Annotated[list[TokenId], Meta(min_length=1)]
    return_progress: bool | None = None


_completion = Schema(NativeRequest, NO_ACTION, refused=REFUSED_FIELDS)


async def complete(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /completion`."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, _completion.decode)
    if request.n not in (None, 1):
        raise BadRequest("'n' is 1 in this form: ask '/v1/completions' for more.", "n", "invalid_value")
    if not request.prompt:
        raise BadRequest("'prompt' is empty.", "prompt", "invalid_value")
    is_stream = bool(request.stream)
    check_progress(request.return_progress, is_stream=is_stream)
    model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown)
    job = await serve.prepare(
        services, record, model, lambda next_rid, ms: _lower_completion(request, model, next_rid, seed, ms)
    )
    encoder = NativeEncoder(model.full_name)
    if is_stream:
        await job.stream(encoder, receive, send, on_progress=encoder.progress if request.return_progress else None)
    else:
        await job.whole(encoder, receive, send)


def _lower_completion(
    request: NativeRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int
) -> list[Generate]:
    given = request.prompt
    prompt = TextPrompt(given) if isinstance(given, str) else TokensPrompt(tuple(given))
    return lower_texts(request, model, [prompt], next_rid, seed, request.token_limit, deadline_ms)


EXTRA_FILES_MAX: Final = 256
# llama.vim and llama.vscode always send these fields, so they are reported as ignored and not refused.
_ALWAYS_SENT: Final = frozenset({"samplers", "n_indent", "t_max_predict_ms"})
_REFUSED: Final = {name: each for name, each in REFUSED_FIELDS.items() if name not in _ALWAYS_SENT}


class InfillFile(Struct, frozen=True):
    """Another file that gives the model context."""

    text: str
    filename: str = ""


class InfillRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of `POST /infill`. The text to fill in begins with `prompt`. With `n_predict` 0, the request only fills the
    prefix cache.
    """

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InfillFile], Meta(max_length=EXTRA_FILES_MAX)] | None = None
    prompt: str | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.n_predict is None else self.n_predict


_infill = Schema(InfillRequest, NO_ACTION, "input_extra", InfillFile, refused=_REFUSED)


async def fill_middle(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /infill`."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, _infill.decode)
    if request.n not in (None, 1):
        raise BadRequest("'n' is 1 where a middle is filled in.", "n", "invalid_value")
    is_stream = bool(request.stream)
    model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown)
    job = await serve.prepare(
        services, record, model, lambda next_rid, ms: _lower_infill(request, model, next_rid, seed, ms)
    )
    encoder = NativeEncoder(model.full_name)
    await (job.stream(encoder, receive, send) if is_stream else job.whole(encoder, receive, send))


def _lower_infill(
    request: InfillRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int
) -> list[Generate]:
    files = tuple((each.filename, each.text) for each in request.input_extra or ())
    prompt = TextPrompt(request.input_prefix, Infill(request.input_suffix, request.prompt or "", files))
    return lower_texts(request, model, [prompt], next_rid, seed, request.most_tokens, deadline_ms)


class SlotSettings(Struct, frozen=True):
    """Settings of each slot. If the model is not loaded, `n_ctx` comes from its files; it is left out if unknown."""

    n_ctx: int | UnsetType = UNSET


class PropsModalities(Struct, frozen=True):
    """Media that a prompt may contain."""

    vision: bool
    audio: bool


class Props(Struct, frozen=True):
    """Properties of a model. `total_slots` is the maximum number of concurrent sequences."""

    default_generation_settings: SlotSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: PropsModalities
    build_info: str
    chat_template: str | UnsetType = UNSET
    chat_template_tool_use: str | UnsetType = UNSET


async def model_props(catalog: Catalog, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /props`, by default for the default model or the only one that the caller may use."""
    caller = record_of(scope).caller
    name = QueryParams(scope["query_string"]).get("model", "")
    if not name:
        usable = caller.usable(catalog.services.config.models.values())
        name = usable[0].name if len(usable) == 1 else ""
    entry = await catalog.find(name, caller)
    ready = entry.view.ready
    props = Props(
        SlotSettings(entry.longest_context or UNSET),
        ready.max_running if ready is not None else entry.model.slots,
        entry.name,
        entry.source(caller),
        PropsModalities("image" in entry.modalities, "audio" in entry.modalities),
        f"mlxd-{protocol.__version__}",
        entry.chat_template or UNSET,
        (not entry.model.chat_template and entry.facts.tool_template) or UNSET,
    )
    await send_body(send, 200, msgspec.json.encode(props))
