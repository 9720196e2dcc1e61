"""Sampling fields beyond OpenAI's, as vLLM, llama.cpp, text-generation-webui and mlx-lm name them."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.api.common.constraints import FormatFields
from gateway.errors import BadRequest

BREAKERS: Final = ("\n", ":", '"', "*")
_LISTED_MAX: Final = 64
_IDS_MAX: Final = 16_384
_WORD_CHARS_MAX: Final = 256
_TOKENS_MAX: Final = 1 << 40

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Window = Annotated[int, Meta(ge=-1, le=_TOKENS_MAX)]
Text = Annotated[str, Meta(max_length=_WORD_CHARS_MAX)]
Unit = Annotated[float, Meta(ge=0, le=1)]


class SamplerFields(FormatFields, frozen=True, kw_only=True):
    """Fields for formats, token limits and samplers.

    Windows are in tokens; -1 means the whole context. A `repetition_context_size` of 0 means that too, and 0 in the
    other windows turns the sampler off.
    """

    min_tokens: Annotated[int, Meta(ge=0, le=_TOKENS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=_LISTED_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Text], Meta(max_length=_LISTED_MAX)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=_IDS_MAX)] | None = None
    # llama.cpp's and mlx-lm's names of the same penalty window.
    repeat_last_n: Window | None = None
    repetition_context_size: Window | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    # A negative value, like zero, turns this sampler off.
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] | None = None
    xtc_probability: Unit | None = None
    xtc_threshold: Unit | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=4)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0, le=1024)] | None = None
    dry_penalty_last_n: Window | None = None
    # The value is a list, or the JSON text of a list.
    dry_sequence_breakers: (
        Annotated[list[Text], Meta(max_length=_LISTED_MAX)]
        | Annotated[str, Meta(max_length=_LISTED_MAX * _WORD_CHARS_MAX)]
        | None
    ) = None
    # False keeps special tokens in the text of the output.
    skip_special_tokens: bool | None = None

    @property
    def penalty_window(self) -> int | None:
        """Number of tokens to which penalties apply: 0 means all tokens, and None means none."""
        window = self.repeat_last_n if self.repeat_last_n is not None else self.repetition_context_size
        if self.repeat_last_n == 0:
            return None
        return max(0, window or 0)


def sampler_values(request: SamplerFields) -> dict[str, Any]:
    """Return the values of `protocol.Sampling` for the fields that a request sets. Raises `BadRequest`."""
    named = {
        "min_tokens": request.min_tokens,
        "stop_ids": tuple(request.stop_token_ids or ()) or None,
        "allowed_ids": None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        "bad_words": tuple(word for word in request.bad_words or () if word) or None,
        "penalty_window": request.penalty_window,
        "typical_p": request.typical_p,
        "top_n_sigma": None if request.top_n_sigma is None else max(0.0, request.top_n_sigma),
        "xtc_probability": request.xtc_probability,
        "xtc_threshold": request.xtc_threshold,
    }
    if named["allowed_ids"] == ():
        raise BadRequest("'allowed_token_ids' is empty: no token is left.", "allowed_token_ids", "invalid_value")
    # A window of zero tokens turns DRY off, as in llama.cpp.
    if request.dry_multiplier and request.dry_penalty_last_n != 0:
        named |= {
            "dry_multiplier": request.dry_multiplier,
            "dry_base": request.dry_base,
            "dry_allowed_length": request.dry_allowed_length,
            "dry_window": max(0, request.dry_penalty_last_n or 0),
            "dry_breakers": _breakers(request.dry_sequence_breakers),
        }
    return {name: value for name, value in named.items() if value is not None}


def _breakers(given: list[str] | str | None) -> tuple[str, ...]:
    if given is None:
        return BREAKERS
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=list[str])
        except (msgspec.DecodeError, RecursionError):
            param = "dry_sequence_breakers"
            message = f"Invalid value for '{param}': expected a list of texts."
            raise BadRequest(message, param, "invalid_value") from None
    return tuple(sorted({text for text in given if text}))
