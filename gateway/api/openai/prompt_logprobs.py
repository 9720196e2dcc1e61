"""Log-probabilities of prompt tokens as vLLM sends them: null for the first token, then an object by token id."""

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Raw, Struct, UnsetType

from gateway.api.common.doc_hints import shape
from protocol.from_worker import PromptLogprob

# OpenAI's substitute for minus infinity, which JSON cannot express.
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

# The entries are kept as JSON, because those of a long prompt would take megabytes as objects.
PromptLogprobs = Annotated[Raw | UnsetType, shape(_FORM)]

_encode: Final = msgspec.json.Encoder().encode


class RankedLogprob(Struct, frozen=True):
    """One candidate token: its log-probability, its rank (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str


def encode_entries(entries: Sequence[PromptLogprob]) -> bytes:
    """Encode one or more entries as JSON, without the brackets around the list."""
    return _encode([_entry(each) for each in entries])[1:-1]


def whole(parts: Sequence[bytes]) -> Raw:
    """Join encoded parts into the whole list."""
    return Raw(b"[" + b",".join(parts) + b"]")


def _entry(entry: PromptLogprob) -> dict[int, RankedLogprob] | None:
    """Return an object with the prompt's own token and the likeliest tokens; None for a prompt's first token."""
    if not entry.rank:
        return None
    named = {entry.id: _ranked(entry.token, entry.logprob, entry.rank)}
    rank, last = 0, float("nan")
    for at, (token, text, logprob) in enumerate(entry.top, 1):
        # Equally likely tokens share a rank.
        rank, last = (rank if logprob == last else at), logprob
        named.setdefault(token, _ranked(text, logprob, rank))
    return named


def _ranked(token: bytes, logprob: float, rank: int) -> RankedLogprob:
    # NaN, which JSON cannot express either, also fails the comparison and becomes LOGPROB_MIN.
    return RankedLogprob(logprob if logprob > LOGPROB_MIN else LOGPROB_MIN, rank, token.decode("utf-8", "replace"))
