"""`POST /infill`: fill in the middle of a text, as in llama.cpp's server."""

from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.refused_fields import REFUSED_FIELDS
from gateway.api.openai.events import EventEncoder, event
from gateway.api.openai.lowering import lower_texts
from gateway.api.openai.request import SamplingFields
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from gateway.request.record import record_of
from gateway.services import Services
from protocol.from_worker import Delta, Finish, Usage
from protocol.prompts import Infill, TextPrompt
from protocol.to_worker import Generate

EXTRA_FILES_MAX: Final = 256
# Fields for llama.cpp's cache, slots and truncation. Here every prefix is cached, and too long a prompt is a 400.
NO_ACTION: Final = frozenset({"cache_prompt", "id_slot", "n_keep"})
# llama.vim and llama.vscode always send these fields, so they are reported as ignored and not refused.
_ALWAYS_SENT: Final = frozenset({"samplers", "n_indent", "t_max_predict_ms"})
_REFUSED: Final = {name: each for name, each in REFUSED_FIELDS.items() if name not in _ALWAYS_SENT}
_EMPTY: Final = Usage(0, 0, 0)


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
        if self.n_predict is None or self.n_predict < 0:
            return self.max_tokens
        return max(1, self.n_predict)


class Timings(Struct, frozen=True):
    """Numbers of tokens and milliseconds for the prompt and for the output."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class InfillResponse(Struct, frozen=True, kw_only=True):
    """A piece of the middle, or all of it. The last has `stop` true, and the counts and timings."""

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


_infill = Schema(InfillRequest, NO_ACTION, "input_extra", InfillFile, refused=_REFUSED)


async def fill_middle(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /infill`."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, _infill.decode)
    if request.n not in (None, 1):
        raise BadRequest("'n' is 1 where a middle is filled in.", "n", "invalid_value")
    is_stream = bool(request.stream)
    model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown)
    job = await serve.prepare(services, record, model, lambda next_rid, ms: _lower(request, model, next_rid, seed, ms))
    encoder = InfillEncoder(model.full_name, is_silent=request.n_predict == 0)
    await (job.stream(encoder, receive, send) if is_stream else job.whole(encoder, receive, send))


def _lower(
    request: InfillRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int
) -> list[Generate]:
    files = tuple((each.filename, each.text) for each in request.input_extra or ())
    prompt = TextPrompt(request.input_prefix, Infill(request.input_suffix, request.prompt or "", files))
    return lower_texts(request, model, [prompt], next_rid, seed, request.most_tokens, deadline_ms)


class InfillEncoder(EventEncoder):
    """Encoder of infill deltas as llama.cpp's stream events, or as one whole answer."""

    def __init__(self, model: str, *, is_silent: bool) -> None:
        self._model = model
        self._is_silent = is_silent
        self._texts: list[str] = []
        self._end = Delta(0, finish=Finish.STOP)

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        text = self._text(deltas)
        return event(InfillResponse(content=text, stop=False, model=self._model)) if text else b""

    def add(self, deltas: Sequence[Delta]) -> None:
        self._texts.append(self._text(deltas))

    def end(self) -> bytes:
        return event(self._last(""))

    def result(self) -> bytes:
        return msgspec.json.encode(self._last("".join(self._texts)))

    def _text(self, deltas: Sequence[Delta]) -> str:
        """Return the text of these deltas, and record the end if it is among them."""
        for delta in deltas:
            if delta.finish is not None:
                self._end = delta
        return "" if self._is_silent else "".join(delta.text for delta in deltas)

    def _last(self, text: str) -> InfillResponse:
        usage, stop = self._end.usage or _EMPTY, self._end.stop
        is_cut = self._end.finish is Finish.LENGTH
        predicted = 0 if self._is_silent else usage.completion
        evaluated = usage.prompt - usage.cached
        return InfillResponse(
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
