"""Log-probabilities of a prompt's tokens in vLLM's form: null for the first token, then an object by token id."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw, Struct, UnsetType

from gateway.api.common.doc_hints import shape
from protocol.messages import PromptLogprob

# JSON has no minus infinity; OpenAI writes this.
LOGPROB_MIN: Final = -9999.0

_FORM: Final[dict[str, Any]] = {
    "type": "array",
    "items": {
        "type": ["object", "null"],
        "additionalProperties": {
            "type": "object",
            "properties": {
                "logprob": {"type": "number"},
                "rank": {"type": "integer"},
                "decoded_token": {"type": "string"},
            },
        },
    },
}

# Encoded: entries of a long prompt are megabytes of objects.
PromptLogprobs = Annotated[Raw | UnsetType, shape(_FORM)]

_encode: Final = msgspec.json.Encoder().encode


class RankedLogprob(Struct, frozen=True):
    """One token where it might stand: how likely it is, one more than the tokens that are likelier, and its text."""

    logprob: float
    rank: int
    decoded_token: str


def encode_entries(entries: Sequence[PromptLogprob]) -> bytes:
    """JSON of these entries, which is not empty, without the brackets around them."""
    return _encode([_entry(each) for each in entries])[1:-1]


def whole(parts: Sequence[bytes]) -> Raw:
    """The list of all entries, of which these are the parts."""
    return Raw(b"[" + b",".join(parts) + b"]")


def _entry(entry: PromptLogprob) -> dict[int, RankedLogprob] | None:
    """The token itself, then the likeliest ones; nothing comes before the first of a prompt."""
    if not entry.rank:
        return None
    named = {entry.id: _ranked(entry.token, entry.logprob, entry.rank)}
    rank, last = 0, float("nan")
    for at, (token, text, logprob) in enumerate(entry.top, 1):
        # Equally likely tokens have one rank.
        rank, last = (rank if logprob == last else at), logprob
        named.setdefault(token, _ranked(text, logprob, rank))
    return named


def _ranked(token: bytes, logprob: float, rank: int) -> RankedLogprob:
    # JSON has no NaN either, which is no greater than anything.
    return RankedLogprob(logprob if logprob > LOGPROB_MIN else LOGPROB_MIN, rank, token.decode("utf-8", "replace"))
