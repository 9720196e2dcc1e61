"""Body of a request that leaves this machine: the fields that decide where it goes and what it costs."""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.api.common.structure import check_json
from gateway.errors import BadRequest
from protocol.codec import UNREADABLE

# Completions that set no limit are this long, here and at others; chats have none.
_COMPLETION_TOKENS: Final = 16
_LIMITS: Final = ("max_tokens", "max_completion_tokens")

_Choices = Annotated[int, Meta(ge=1, le=1 << 20)]
_Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]


class RoutedFields(msgspec.Struct, frozen=True):
    """The fields that decide where a request goes."""

    model: str = ""
    stream: bool | None = False


class _Wanted(msgspec.Struct, frozen=True):
    """The fields that decide what a request costs."""

    n: _Choices | None = None
    best_of: _Choices | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    prompt: str | list[msgspec.Raw] | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences: prompts, by the choices of each."""
        prompts = 1
        if isinstance(self.prompt, list) and self.prompt and bytes(self.prompt[0])[:1] in (b'"', b"["):
            prompts = len(self.prompt)
        return prompts * max(self.n or 1, self.best_of or 1)


_asked: Final = msgspec.json.Decoder(RoutedFields)
_wanted: Final = msgspec.json.Decoder(_Wanted)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class LeavingBody:
    """A body within its key's limits. `max_tokens` is of each sequence; None is no limit."""

    sequences: int
    max_tokens: int | None
    fields: dict[str, msgspec.Raw]

    def named(self, model: str) -> bytes:
        """The body for an upstream that has the model by this name; all other fields as they came."""
        return msgspec.json.encode(self.fields | {"model": msgspec.Raw(msgspec.json.encode(model))})


def read_asked(body: bytes) -> RoutedFields:
    """The fields, or empty ones of a body that the endpoint will refuse in its own way."""
    try:
        return _asked.decode(body)
    except UNREADABLE:
        return RoutedFields()


def bounded_body(body: bytes, most_tokens: int) -> LeavingBody:
    """The body with its answers limited to `most_tokens`, which is 0 for no limit. Raises `BadRequest`."""
    check_json(body)
    try:
        wanted, fields = _wanted.decode(body), _fields.decode(body)
    except UNREADABLE as error:
        raise BadRequest(f"The body is not valid: {error}.") from None
    told = {name: limit for name in _LIMITS if (limit := getattr(wanted, name)) is not None}
    if not told and wanted.prompt is not None:
        told = {"max_tokens": _COMPLETION_TOKENS}
    if most_tokens:
        told = {name: min(limit, most_tokens) for name, limit in told.items()} or {"max_tokens": most_tokens}
        fields |= {name: msgspec.Raw(b"%d" % limit) for name, limit in told.items()}
    return LeavingBody(wanted.sequences, max(told.values(), default=None), fields)
