"""Logit processors of one request: bias, penalties, and forbidden tokens, as functions of the row's own tokens.

A processor runs before the newest token reaches the host, so it computes with arrays and evaluates none of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx

from protocol.to_worker import Sampling

Processor = Callable[[mx.array, mx.array], mx.array]
"""(context ids `[tokens]`, logits `[1, vocab]`) -> logits; context is prompt and output so far."""

# Length of a repetition above which the penalty does not grow, as in DRY's first implementation.
DRY_MAX_MATCH_TOKENS: Final = 50
# Maximum number of newest context tokens that DRY searches: each step takes about 200 bytes per token and row.
DRY_WINDOW_TOKENS: Final = 32_768


@dataclass(slots=True, frozen=True)
class BadWords:
    """Token ids of a request's texts: forbidden sequences, DRY sequence breakers, and biases."""

    bad: Sequence[Sequence[int]] = field(default_factory=tuple)
    breakers: Sequence[int] = field(default_factory=tuple)
    bias: Sequence[tuple[int, float]] = field(default_factory=tuple)


NO_WORDS: Final = BadWords()


def processors(
    params: Sampling, prompt_tokens: int, words: BadWords = NO_WORDS, eos_ids: Sequence[int] = ()
) -> list[Processor]:
    """Return the processors of one request, in the order of `Sampling`'s fields; empty for most requests."""
    chain: list[Processor] = []
    window = params.penalty_window
    if params.logit_bias or words.bias:
        chain.append(_bias(_joined(params.logit_bias, words.bias)))
    if params.repetition_penalty != 1.0:
        chain.append(_repetition(params.repetition_penalty, window))
    if params.presence_penalty or params.frequency_penalty:
        chain.append(_presence_and_frequency(params.presence_penalty, params.frequency_penalty, prompt_tokens, window))
    if params.dry_multiplier > 0:
        chain.append(_dry(params, words.breakers))
    if params.allowed_ids:
        chain.append(_only(params.allowed_ids))
    if words.bad:
        chain.append(_none_of(words.bad))
    if params.min_tokens and (ends := (*eos_ids, *params.stop_ids)):
        chain.append(_not_before(params.min_tokens, prompt_tokens, ends))
    return chain


def _joined(bias: dict[int, float], more: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Merge the biases of ids and of texts; a token with several biases gets their sum."""
    joined = dict(bias)
    for token, value in more:
        joined[token] = joined.get(token, 0.0) + value
    return joined


def _bias(bias: dict[int, float]) -> Processor:
    ids, values = mx.array(list(bias.keys())), mx.array(list(bias.values()))

    def apply(_context: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, ids].add(values.astype(logits.dtype))

    return apply


def _repetition(penalty: float, window: int) -> Processor:
    """Divide positive and multiply negative logits of every context token (CTRL, arXiv:1909.05858, eq. 2)."""

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        context = context[-window:] if window else context
        seen = logits[:, context]
        logits[:, context] = mx.where(seen < 0, seen * penalty, seen / penalty)
        return logits

    return apply


def _presence_and_frequency(presence: float, frequency: float, prompt_tokens: int, window: int) -> Processor:
    """Subtract count * frequency + (count > 0) * presence, over the output only (OpenAI API reference)."""

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        output = context[prompt_tokens:]
        output = output[-window:] if window else output
        if output.size == 0:
            return logits
        counts = mx.zeros(logits.shape[-1:], dtype=mx.float32).at[output].add(1.0)
        return logits - (counts * frequency + (counts > 0) * presence).astype(logits.dtype)[None]

    return apply


def _dry(params: Sampling, breakers: Sequence[int]) -> Processor:
    """Subtract multiplier * base^(length - allowed length) from tokens that would continue a repetition (DRY).

    `length` is the length of the longest suffix of the context that already occurred before this token. No repetition
    extends over a breaker, and breakers are not penalized. The method is by p-e-w.
    """
    flags: list[mx.array] = []

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        context = context[-min(params.dry_window or DRY_WINDOW_TOKENS, DRY_WINDOW_TOKENS) :]
        length = context.size
        if length <= params.dry_allowed_length:
            return logits
        if not flags:
            flags.append(_flags(breakers, logits.shape[-1]))
        is_breaker = flags[0]
        depth = min(DRY_MAX_MATCH_TOKENS, length - 1)
        back = mx.arange(depth)[:, None]
        ends = context[length - 1 - back]
        # An entry is true if the token `back` places before an earlier place equals the token as far before the end.
        at = mx.arange(length - 1)[None] - back
        is_same = (at >= 0) & (context[mx.maximum(at, 0)] == ends) & ~is_breaker[ends]
        lengths = mx.sum(mx.cumprod(is_same.astype(mx.int32), axis=0), axis=0)
        follows = context[1:]
        excess = (lengths - params.dry_allowed_length).astype(mx.float32)
        is_hit = (excess >= 0) & ~is_breaker[follows]
        values = mx.where(is_hit, params.dry_multiplier * mx.power(params.dry_base, excess), 0.0)
        penalty = mx.zeros(logits.shape[-1:], dtype=mx.float32).at[follows].maximum(values)
        return (logits.astype(mx.float32) - penalty[None]).astype(logits.dtype)

    return apply


def _only(ids: Sequence[int]) -> Processor:
    flags: list[mx.array] = []

    def apply(_context: mx.array, logits: mx.array) -> mx.array:
        if not flags:
            flags.append(_flags(ids, logits.shape[-1]))
        return mx.where(flags[0][None], logits, -math.inf).astype(logits.dtype)

    return apply


def _none_of(sequences: Sequence[Sequence[int]]) -> Processor:
    """Forbid the last token of each sequence if the context ends with the sequence's other tokens."""
    single = [sequence[0] for sequence in sequences if len(sequence) == 1]
    longer = [(mx.array(list(sequence[:-1])), sequence[-1]) for sequence in sequences if len(sequence) > 1]

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        if single:
            logits[:, mx.array(single)] = -math.inf
        for begin, last in longer:
            if context.size >= begin.size:
                is_begun = mx.all(context[-begin.size :] == begin)
                logits[:, last] = mx.where(is_begun, -math.inf, logits[:, last])
        return logits

    return apply


def _not_before(count: int, prompt_tokens: int, ends: Sequence[int]) -> Processor:
    """Forbid the end tokens until the output has `count` tokens."""
    ids = mx.array(list(ends))

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        if context.size - prompt_tokens < count:
            logits[:, ids] = -math.inf
        return logits

    return apply


def _flags(ids: Sequence[int], vocab: int) -> mx.array:
    """Return a mask `[vocab]`, true for these ids."""
    known = mx.array([token for token in ids if 0 <= token < vocab], dtype=mx.int32)
    return mx.zeros((vocab,), dtype=mx.int32).at[known].add(1) > 0
