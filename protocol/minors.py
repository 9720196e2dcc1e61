"""Version of the protocol, and the minor versions that added request fields, for workers older than their gateway.

A worker of an earlier minor silently ignores fields that it does not know.
"""

from typing import Any, Final

import msgspec

from protocol.prompts import ChatPrompt, EmbedPrompt, NextTurnPrompt, Prompt, ScorePrompt, TextPrompt
from protocol.to_worker import Generate, Sampling

MAJOR: Final = 1
MINOR: Final = 1

# Minor versions that added fields which affect the output. Embeddings and scores need no entry: they are requested only
# from workers that report these kinds.
SINCE: Final[dict[type[msgspec.Struct], dict[str, int]]] = {
    Generate: dict.fromkeys(
        (
            "includes_stop",
            "shows_special",
            "adapter",
            "sparse_keep",
            "truncate",
            "cuts_tokens",
            "prompt_ids",
            "prompt_logprobs",
            "questions",
        ),
        1,
    ),
    ChatPrompt: {"media": 1},
    TextPrompt: {"infill": 1, "adds_special": 1},
    Sampling: dict.fromkeys(
        (
            "penalty_window",
            "typical_p",
            "top_n_sigma",
            "xtc_probability",
            "dry_multiplier",
            "min_tokens",
            "stop_ids",
            "allowed_ids",
            "bad_words",
            "bias_texts",
        ),
        1,
    ),
}
# Minor version that added the message `SetPace`.
SET_PACE_MINOR: Final = 1
# Minor version that supports `echo` together with `top_logprobs`; both fields are older.
PROMPT_LOGPROBS_MINOR: Final = 1
# Minor version that added `EmbedPrompt` and `ScorePrompt`.
EMBEDDING_MINOR: Final = 1
# Minor version that added `NextTurnPrompt`.
NEXT_TURN_MINOR: Final = 1
# Minor version that added `SetAdapters`.
SET_ADAPTERS_MINOR: Final = 1
# Minor version that added `Explain`.
EXPLAIN_MINOR: Final = 1

_DEFAULTS: Final[dict[type[msgspec.Struct], dict[str, Any]]] = {
    struct: {field.name: field.default for field in msgspec.structs.fields(struct)} for struct in SINCE
}


def unknown_field(request: Generate, minor: int) -> str | None:
    """Return a field that `request` sets and a worker of this minor does not know, if any."""
    for part in (request, request.prompt, request.sampling):
        if (name := _unknown(part, minor)) is not None:
            return name
    if minor < PROMPT_LOGPROBS_MINOR and request.echo and request.top_logprobs is not None:
        return "logprobs of the prompt"
    if minor < NEXT_TURN_MINOR and isinstance(request.prompt, NextTurnPrompt):
        return "prompts of next turns"
    return None


def unknown_part(prompt: Prompt, minor: int) -> str | None:
    """Return a part of a call's prompt that a worker of this minor does not know, if any.

    A message with an unknown kind of prompt would be malformed to the worker, and get no answer.
    """
    if minor < EMBEDDING_MINOR and isinstance(prompt, EmbedPrompt | ScorePrompt):
        return "prompts of models that read"
    return _unknown(prompt, minor)


def _unknown(part: msgspec.Struct, minor: int) -> str | None:
    defaults = _DEFAULTS.get(type(part), {})
    for name, since in SINCE.get(type(part), {}).items():
        if since > minor and getattr(part, name) != defaults[name]:
            return name
    return None
