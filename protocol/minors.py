"""The minor version with which each field of a request came, for workers that are older than their gateway.

A worker of an earlier minor leaves out the fields that it does not know, without a word.
"""

from typing import Any, Final

import msgspec

from protocol.messages import ChatPrompt, EmbedPrompt, Generate, Prompt, Sampling, ScorePrompt, TextPrompt

# Of fields that change the output. Embeddings and scores are asked of workers only that say they are for these.
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
# Of the message `SetPace`.
PACE: Final = 1
# Of `echo` together with `top_logprobs`, both of which are older.
PROMPT_LOGPROBS: Final = 1
# Of `EmbedPrompt` and `ScorePrompt`.
READING: Final = 1
# Of `SetAdapters`.
ADAPTERS: Final = 1

_DEFAULTS: Final[dict[type[msgspec.Struct], dict[str, Any]]] = {
    struct: {field.name: field.default for field in msgspec.structs.fields(struct)} for struct in SINCE
}


def unknown_field(request: Generate, minor: int) -> str | None:
    """A field that `request` sets and a worker of this minor does not know, if there is one."""
    for part in (request, request.prompt, request.sampling):
        if (name := _unknown(part, minor)) is not None:
            return name
    if minor < PROMPT_LOGPROBS and request.echo and request.top_logprobs is not None:
        return "logprobs of the prompt"
    return None


def unknown_part(prompt: Prompt, minor: int) -> str | None:
    """A part of the prompt of a question that a worker of this minor does not know, if there is one.

    A message with a prompt of a kind that it does not know would be no message to it, and have no answer.
    """
    if minor < READING and isinstance(prompt, EmbedPrompt | ScorePrompt):
        return "prompts of models that read"
    return _unknown(prompt, minor)


def _unknown(part: msgspec.Struct, minor: int) -> str | None:
    defaults = _DEFAULTS.get(type(part), {})
    for name, since in SINCE.get(type(part), {}).items():
        if since > minor and getattr(part, name) != defaults[name]:
            return name
    return None
