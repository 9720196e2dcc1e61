"""Processors of one request: bias, penalties, and tokens that may not come. Each is a function of the row's own tokens.

A processor runs before the newest token is known to this process: it works on arrays, and reads none of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx

from protocol.messages import Sampling

Processor = Callable[[mx.array, mx.array], mx.array]
"""(context ids `[tokens]`, logits `[1, vocab]`) -> logits; context is prompt and output so far."""

# A repetition counts up to this many tokens, as in the first implementation of DRY: beyond it the penalty is absolute.
DRY_LONGEST: Final = 50
# Of a longer context the newest tokens are looked at: each step takes some 200 bytes for each of them and row.
DRY_WINDOW: Final = 32_768


@dataclass(slots=True, frozen=True)
class BadWords:
    """Token ids of a request's texts: sequences that may not come, tokens that end a repetition, and biases."""

    bad: Sequence[Sequence[int]] = field(default_factory=tuple)
    breakers: Sequence[int] = field(default_factory=tuple)
    bias: Sequence[tuple[int, float]] = field(default_factory=tuple)


NO_WORDS: Final = BadWords()


def processors(
    params: Sampling, prompt_tokens: int, words: BadWords = NO_WORDS, eos_ids: Sequence[int] = ()
) -> list[Processor]:
    """Bias, penalties and limits of one request, in the order of `Sampling`; empty for most."""
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
    """Biases of ids and of texts; a token that has several gets their sum."""
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
    """Divides positive and multiplies negative logits of every token seen (CTRL, arXiv:1909.05858, eq. 2)."""

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        context = context[-window:] if window else context
        seen = logits[:, context]
        logits[:, context] = mx.where(seen < 0, seen * penalty, seen / penalty)
        return logits

    return apply


def _presence_and_frequency(presence: float, frequency: float, prompt_tokens: int, window: int) -> Processor:
    """logit -= count * frequency + (count > 0) * presence, over the output only (OpenAI API reference)."""

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        output = context[prompt_tokens:]
        output = output[-window:] if window else output
        if output.size == 0:
            return logits
        counts = mx.zeros(logits.shape[-1:], dtype=mx.float32).at[output].add(1.0)
        return logits - (counts * frequency + (counts > 0) * presence).astype(logits.dtype)[None]

    return apply


def _dry(params: Sampling, breakers: Sequence[int]) -> Processor:
    """logit -= multiplier * base^(length - allowed length) of each token that would go on with a repetition.

    Its length is that of the longest end of the context that came before this token already (DRY, by p-e-w). No
    repetition reaches over a breaker, and none is penalized that would go on with one.
    """
    flags: list[mx.array] = []

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        context = context[-min(params.dry_window or DRY_WINDOW, DRY_WINDOW) :]
        length = context.size
        if length <= params.dry_allowed_length:
            return logits
        if not flags:
            flags.append(_flags(breakers, logits.shape[-1]))
        is_breaker = flags[0]
        depth = min(DRY_LONGEST, length - 1)
        back = mx.arange(depth)[:, None]
        ends = context[length - 1 - back]
        # Of each earlier place, whether the token so far back is the one so far back from the end.
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
    """Forbid the last token of each sequence where the context ends with the others."""
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
    """Forbid the end while there are fewer tokens than `count`."""
    ids = mx.array(list(ends))

    def apply(context: mx.array, logits: mx.array) -> mx.array:
        if context.size - prompt_tokens < count:
            logits[:, ids] = -math.inf
        return logits

    return apply


def _flags(ids: Sequence[int], vocab: int) -> mx.array:
    """`[vocab]`, true for these."""
    known = mx.array([token for token in ids if 0 <= token < vocab], dtype=mx.int32)
    return mx.zeros((vocab,), dtype=mx.int32).at[known].add(1) > 0
