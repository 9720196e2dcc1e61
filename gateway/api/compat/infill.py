"""`POST /infill`: fill in the middle of a text, as in llama.cpp's server."""

from collections.abc import Callable
from typing import Annotated, Final

from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.decode import Schema
from gateway.api.common.refused_fields import REFUSED_FIELDS
from gateway.api.compat.native_completion import NO_ACTION, NativeEncoder
from gateway.api.openai.lowering import lower_texts
from gateway.api.openai.request import SamplingFields
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from gateway.request.record import record_of
from gateway.services import Services
from protocol.prompts import Infill, TextPrompt
from protocol.to_worker import Generate

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
    job = await serve.prepare(services, record, model, lambda next_rid, ms: _lower(request, model, next_rid, seed, ms))
    encoder = NativeEncoder(model.full_name)
    await (job.stream(encoder, receive, send) if is_stream else job.whole(encoder, receive, send))


def _lower(
    request: InfillRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int
) -> list[Generate]:
    files = tuple((each.filename, each.text) for each in request.input_extra or ())
    prompt = TextPrompt(request.input_prefix, Infill(request.input_suffix, request.prompt or "", files))
    return lower_texts(request, model, [prompt], next_rid, seed, request.most_tokens, deadline_ms)
