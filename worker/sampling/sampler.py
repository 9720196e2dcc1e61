"""Sampling of tokens: temperature, filters of unlikely and of likely tokens, and seeds.

Every row of a batch shares one `RowSampler`, so that sampling is a handful of operations on `[rows, vocab]` regardless
of the number of different parameters. The token at output position p of a request is drawn with a key made of (seed, p)
only: other rows of the batch, chunking, preemption and restarts cannot change it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from protocol.to_worker import Sampling
from worker.sampling.penalties import Processor
from worker.structured.masks import Masks

_MASK64 = (1 << 64) - 1
# Sampling is greedy below this temperature, where division would only select the best token and finally overflow.
_GREEDY_TEMPERATURE = 1e-5
# Maximum top_k for which selecting and ordering the best tokens is faster than ordering the whole vocabulary.
_MAX_PARTIAL_TOP_K = 1024
# Number above each vocabulary: top_k without effect.
_ALL: Final = 2**31 - 1
# SplitMix64's increment (Steele, Lea, Flood 2014) spreads consecutive positions over the key space.
_GOLDEN = 0x9E3779B97F4A7C15
# XTC's draws use keys made from the seed changed by this mask.
_XTC_SEED_MASK = 0x58544358544358
# Maximum number of cached plans. A batch needs one plan for its steps, and another for the drafts between the steps.
_MAX_PLANS: Final = 8


@dataclass(slots=True, eq=False)
class Draws:
    """Sampling parameters of one sequence, and the output position of its next token."""

    params: Sampling
    position: int = 0


class SampledRow(Protocol):
    """Sequence that has its sampling parameters and position in `draws`."""

    @property
    def draws(self) -> Draws: ...


class RowSampler:
    """Sampler of all rows of a call at once. Everything that it needs of a row is in the row's `draws`."""

    def __init__(
        self,
        masks: Masks | None = None,
        suppressed: Sequence[int] = (),
        agree: Callable[[mx.array], mx.array] | None = None,
        table_rows: int = 0,
    ) -> None:
        """`agree` replaces sampled ids by those that all ranks of a group use. Logits may be wider than the embedding
        table, in which MLX checks no bounds: ids from `table_rows` on are never drawn; 0 means no limit.
        """
        # Masks of the rows' grammars are applied to the logits before these become log-probabilities.
        self.masks = masks or Masks()
        # Plans of the newest calls, each with its rows' sampling parameters and its number of positions.
        self._plans: list[tuple[list[Sampling], int, _Plan]] = []
        # Ids that are never drawn; `_penalty` is added to their log-probabilities.
        self._suppressed = tuple(suppressed)
        self._penalty: mx.array | None = None
        self._agree = agree
        self._table_rows = table_rows

    def sample(self, rows: Sequence[SampledRow], logprobs: mx.array) -> mx.array:
        """Sample each row's ids at its next positions from log-probabilities `[rows, positions, vocab]`."""
        return self._sample(rows, logprobs, 0)

    def guess(self, rows: Sequence[SampledRow], logits: Any, offset: int) -> mx.array:
        """Sample ids `[rows]` from logits `[rows, vocab]` for the positions `offset` after each row's next position.

        The noise is the same as for the row's own token at that position, so two models that nearly agree draw the same
        ids.
        """
        return self._sample(rows, logits[:, None], offset)[:, 0]

    def _sample(self, rows: Sequence[SampledRow], logprobs: mx.array, offset: int) -> mx.array:
        count, steps, vocab = logprobs.shape
        plan = self._plan([row.draws.params for row in rows], steps)
        keys: list[list[int]] = []
        coins: list[bool] = []
        if plan.is_random:
            places = range(offset, offset + steps)
            draws = [(row.draws.params, row.draws.position + step) for row in rows for step in places]
            keys = [_key(params.seed, position) for params, position in draws]
            coins = [_excludes(params, position) for params, position in draws] if plan.has_xtc else []
        logprobs = self._suppress(logprobs) if self._suppressed else logprobs
        if 0 < self._table_rows < vocab:
            logprobs = mx.where(mx.arange(vocab) < self._table_rows, logprobs, -math.inf)
        ids = plan.sample(logprobs.reshape(count * steps, vocab), keys, coins)
        if self._agree is not None:
            ids = self._agree(ids)
        return ids.reshape(count, steps)

    def advance(self, rows: Sequence[SampledRow], counts: Sequence[int]) -> None:
        """Advance each row by its number of positions."""
        for row, count in zip(rows, counts, strict=True):
            row.draws.position += count

    def _plan(self, params: list[Sampling], steps: int) -> "_Plan":
        for known_params, known_steps, plan in self._plans:
            if known_steps == steps and known_params == params:
                return plan
        plan = _Plan.of([each for each in params for _ in range(steps)])
        self._plans = [(params, steps, plan), *self._plans[: _MAX_PLANS - 1]]
        return plan

    def _suppress(self, logprobs: mx.array) -> mx.array:
        if self._penalty is None or self._penalty.dtype != logprobs.dtype:
            # The dtype is needed for an empty list: MLX would make it an array of floats, which cannot be indices.
            ids = mx.array([token for token in self._suppressed if 0 <= token < logprobs.shape[-1]], dtype=mx.int32)
            self._penalty = mx.zeros(logprobs.shape[-1:], dtype=logprobs.dtype).at[ids].add(-math.inf)
        return logprobs + self._penalty


@dataclass(slots=True)
class _Plan:
    """Sampling parameters of one batch composition, as columns `[rows, 1]`.

    `width` is the number of best tokens that are ordered for `top_k` and `top_p`. 0 means that none are needed, None
    means the whole vocabulary.
    """

    is_random: bool
    has_min_p: bool
    width: int | None
    greedy: mx.array
    is_whole: mx.array
    temperature: mx.array
    top_k: mx.array
    top_p: mx.array
    log_min_p: mx.array
    # Threshold of top_n_sigma for each row; None if no row uses top_n_sigma.
    sigmas: mx.array | None
    typical: mx.array | None
    xtc_threshold: mx.array
    has_xtc: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling]) -> "_Plan":
        def column(values: list[float], dtype: mx.Dtype = mx.float32) -> mx.array:
            return mx.array(values, dtype=dtype)[:, None]

        # The filters leave one token to a top_p of 0; ties, which they keep, must not be drawn from.
        greedy = [row.temperature < _GREEDY_TEMPERATURE or row.top_p <= 0 for row in rows]
        is_whole = [cold or not (row.top_k or row.top_p < 1) for row, cold in zip(rows, greedy, strict=True)]
        ranked = [row.top_k for row, whole in zip(rows, is_whole, strict=True) if not whole]
        return cls(
            is_random=not all(greedy),
            has_min_p=any(row.min_p > 0 for row in rows),
            width=max(ranked, default=0) if all(0 < top_k <= _MAX_PARTIAL_TOP_K for top_k in ranked) else None,
            greedy=mx.array(greedy),
            is_whole=mx.array(is_whole)[:, None],
            temperature=column([1.0 if cold else row.temperature for row, cold in zip(rows, greedy, strict=True)]),
            top_k=column([min(row.top_k or _ALL, _ALL) for row in rows], mx.int32),
            top_p=column([row.top_p if row.top_p < 1 else 2.0 for row in rows]),
            log_min_p=column([math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows]),
            sigmas=column([row.top_n_sigma if row.top_n_sigma > 0 else math.inf for row in rows])
            if any(row.top_n_sigma > 0 for row in rows)
            else None,
            typical=column([row.typical_p for row in rows]) if any(row.typical_p < 1 for row in rows) else None,
            xtc_threshold=column([row.xtc_threshold for row in rows]),
            has_xtc=any(row.xtc_probability > 0 for row in rows),
        )

    def sample(self, logprobs: mx.array, keys: list[list[int]], coins: Sequence[bool] = ()) -> mx.array:
        best = mx.argmax(logprobs, axis=-1)
        if not self.is_random:
            return best
        scaled = logprobs.astype(mx.float32) / self.temperature
        if self.sigmas is not None:
            scaled = _near_the_best(scaled, self.sigmas)
        if self.has_min_p:
            best_scaled = mx.max(scaled, axis=-1, keepdims=True)
            scaled = mx.where(scaled >= best_scaled + self.log_min_p, scaled, -math.inf)
        if self.width != 0:
            scaled = self._filter(scaled)
        if self.typical is not None:
            scaled = _typical(scaled, self.typical)
        if any(coins):
            scaled = _without_the_likely(scaled, self.xtc_threshold, mx.array(list(coins))[:, None])
        # Gumbel-max: argmax(log p + Gumbel noise) is a draw from p.
        noise = _gumbel(keys, logprobs.shape[-1])
        return mx.where(self.greedy, best, mx.argmax(scaled + noise, axis=-1))

    def _filter(self, scaled: mx.array) -> mx.array:
        """Apply top_k, then top_p to the remaining tokens; ties at the threshold are kept."""
        width = scaled.shape[-1] if self.width is None else self.width
        best = mx.topk(scaled, width, axis=-1) if width < scaled.shape[-1] else scaled
        ordered = -mx.sort(-best, axis=-1)
        rank = mx.arange(ordered.shape[-1], dtype=mx.int32)[None]
        # Cumulative sums in order do not depend on the tokens after them, so a row has the same result in any batch.
        mass = mx.where(rank < self.top_k, mx.exp(ordered - ordered[:, :1]), 0.0)
        mass_until = mx.cumsum(mass, axis=-1)
        alive = (rank < self.top_k) & (mass_until - mass < self.top_p * mass_until[:, -1:])
        # The best token always stays: it has rank 0 and no mass before it.
        threshold = mx.min(mx.where(alive | (rank == 0), ordered, math.inf), axis=-1, keepdims=True)
        return mx.where((scaled >= threshold) | self.is_whole, scaled, -math.inf)


def _near_the_best(scaled: mx.array, sigmas: mx.array) -> mx.array:
    """Keep tokens within `sigmas` standard deviations of the best logit (top-n-sigma, arXiv:2411.07641)."""
    is_possible = scaled > -math.inf
    count = mx.sum(is_possible, axis=-1, keepdims=True)
    mean = mx.sum(mx.where(is_possible, scaled, 0.0), axis=-1, keepdims=True) / count
    spread = mx.sum(mx.where(is_possible, mx.square(scaled - mean), 0.0), axis=-1, keepdims=True)
    border = mx.max(scaled, axis=-1, keepdims=True) - sigmas * mx.sqrt(spread / count)
    # An infinite `sigmas` times a spread of 0 is NaN: such a row has no threshold.
    return mx.where((scaled >= border) | mx.isinf(sigmas), scaled, -math.inf)


def _typical(scaled: mx.array, mass: mx.array) -> mx.array:
    """Keep the locally typical tokens (arXiv:2202.00666): those closest to the expected surprise, up to `mass`."""
    logprobs = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
    chances = mx.exp(logprobs)
    entropy = -mx.sum(mx.where(chances > 0, chances * logprobs, 0.0), axis=-1, keepdims=True)
    distance = mx.where(chances > 0, mx.abs(-logprobs - entropy), math.inf)
    order = mx.argsort(distance, axis=-1)
    ordered, masses = (mx.take_along_axis(each, order, axis=-1) for each in (distance, chances))
    is_kept = mx.cumsum(masses, axis=-1) - masses < mass
    border = mx.max(mx.where(is_kept & (ordered < math.inf), ordered, 0.0), axis=-1, keepdims=True)
    return mx.where((distance <= border) | (mass >= 1), scaled, -math.inf)


def _without_the_likely(scaled: mx.array, threshold: mx.array, coins: mx.array) -> mx.array:
    """Remove all tokens above the threshold except the least likely, where `coins` is true (XTC, by p-e-w)."""
    chances = mx.softmax(scaled, axis=-1, precise=True)
    is_above = chances >= threshold
    least = mx.min(mx.where(is_above, chances, math.inf), axis=-1, keepdims=True)
    return mx.where(coins & is_above & (chances > least), -math.inf, scaled)


def _excludes(params: Sampling, position: int) -> bool:
    """Return whether XTC applies at this position. The result depends only on (seed, position), not on the token's
    draw.
    """
    if params.xtc_probability <= 0:
        return False
    high, low = _key(params.seed ^ _XTC_SEED_MASK, position)
    return ((high << 32) | low) < params.xtc_probability * 2.0**64


def _gumbel(keys: list[list[int]], vocab: int) -> mx.array:
    """Return Gumbel noise `[rows, vocab]`. The noise of a row depends only on the row's key."""

    def one(key: mx.array) -> mx.array:
        return mx.random.gumbel(shape=(vocab,), key=key)

    return mx.vmap(one)(mx.array(keys, mx.uint32))


def _key(seed: int, position: int) -> list[int]:
    """Return a Threefry key for one draw: two 32-bit words that depend only on (seed, position)."""
    mixed = ((seed & _MASK64) + (position + 1) * _GOLDEN) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    mixed ^= mixed >> 31
    return [mixed >> 32, mixed & 0xFFFFFFFF]


class Guard:
    """Wrapper of a processor that catches its errors: an exception during a step would corrupt every row.

    Logits of another shape would corrupt them, too, and another dtype would change the logits of other rows. The loop
    checks `error` after the step and fails only this row.
    """

    __slots__ = ("_inner", "error")

    def __init__(self, inner: Processor) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def __call__(self, context: mx.array, logits: mx.array) -> mx.array:
        if self.error is None:
            try:
                return _like(self._inner(context, logits), logits)
            except Exception as error:  # the error fails only this row
                self.error = error
        return logits


def _like(processed: object, logits: mx.array) -> mx.array:
    """Return a processor's result if it has the shape and dtype of `logits`. Raises TypeError."""
    if not isinstance(processed, mx.array):
        raise TypeError(f"a processor returned {type(processed).__name__} instead of logits")
    if processed.shape != logits.shape or processed.dtype != logits.dtype:
        now, then = (f"{one.dtype}{list(one.shape)}" for one in (processed, logits))
        raise TypeError(f"a processor returned {now} for logits of {then}")
    return processed
