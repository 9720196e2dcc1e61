"""Sampling against NumPy, alone and in company."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.to_worker import RepetitionPenalty, Sampling
from worker.sampling.penalties import processors
from worker.sampling.sampler import Draws, Guard, RowSampler

Floats = npt.NDArray[np.float64]
VOCAB = 24


def some_logprobs(seed: int, rows: int = 1, vocab: int = VOCAB) -> Floats:
    logits = np.random.default_rng(seed).normal(0, 2, (rows, vocab))
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@dataclass
class Sampled:
    """A sequence as the sampler sees it."""

    draws: Draws


def sampled(params: Sampling, position: int = 0) -> Sampled:
    return Sampled(Draws(params, position))


def step(sampler: RowSampler, rows: Sequence[Sampled], logprobs: mx.array) -> list[int]:
    """The next token of each row."""
    ids: Any = sampler.sample(rows, logprobs[:, None])[:, 0].tolist()
    sampler.advance(rows, [1] * len(rows))
    return ids


def draw(logprobs: Floats, params: Sequence[Sampling], positions: Sequence[int] | None = None) -> list[int]:
    """One call for rows that differ."""
    rows = [sampled(each, position) for each, position in zip(params, positions or [0] * len(params), strict=True)]
    return step(RowSampler(), rows, mx.array(logprobs.astype(np.float32)))


def draws(logprobs: Floats, params: Sampling, count: int) -> list[int]:
    """The same row with many seeds, all in one call."""
    rows = np.repeat(logprobs, count, axis=0)
    return draw(rows, [reseeded(params, seed) for seed in range(count)])


def reseeded(params: Sampling, seed: int) -> Sampling:
    return Sampling(params.temperature, params.top_p, params.top_k, params.min_p, seed=seed)


def reference(logprobs: Floats, params: Sampling) -> Floats:
    """The distribution that the parameters mean: temperature, then min_p, then top_k, then top_p."""
    scaled = logprobs[0] / params.temperature
    if params.min_p > 0:
        scaled = np.where(np.exp(scaled - scaled.max()) >= params.min_p, scaled, -math.inf)
    order = np.argsort(-scaled, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    probs = np.exp(scaled[kept] - scaled.max())
    probs /= probs.sum()
    if params.top_p < 1:
        before = np.cumsum(probs) - probs
        count = max(1, int((before < params.top_p).sum()))
        kept, probs = kept[:count], probs[:count]
    full = np.zeros(logprobs.shape[-1])
    full[kept] = probs / probs.sum()
    return full


def chi_square(sampled: Sequence[int], expected: Floats) -> float:
    counts = np.bincount(sampled, minlength=len(expected))
    assert counts[expected == 0].sum() == 0, "a token that was filtered out has been sampled"
    # The statistic holds for cells of five and more: all rarer tokens are one cell.
    rare = expected * len(sampled) < 5
    got = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * len(sampled)
    return float(((got - wanted)[wanted > 0] ** 2 / wanted[wanted > 0]).sum())


@pytest.mark.parametrize(
    "params",
    [
        Sampling(),
        Sampling(0.5),
        Sampling(2.0),
        Sampling(top_k=1),
        Sampling(top_k=5),
        Sampling(top_k=VOCAB),
        Sampling(top_k=1 << 31),
        Sampling(top_k=VOCAB + 1, top_p=0.8),
        Sampling(top_p=0.0),
        Sampling(top_p=0.5),
        Sampling(top_p=0.95),
        Sampling(min_p=0.2),
        Sampling(min_p=1.0),
        Sampling(2.0, top_k=6, top_p=0.8),
        Sampling(1.5, top_p=0.9, min_p=0.1),
        Sampling(3.0, top_k=10, top_p=0.7, min_p=0.3),
        Sampling(0.3, top_k=10, top_p=0.99, min_p=0.05),
    ],
    ids=lambda params: f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}",
)
def test_the_distribution_is_the_one_that_the_parameters_mean(params: Sampling) -> None:
    logprobs = some_logprobs(3)
    expected = reference(logprobs, params)
    degrees = int((expected > 0).sum()) - 1
    # Five standard deviations above the mean of the statistic; the seeds are fixed, so this is decided once.
    assert chi_square(draws(logprobs, params, 4096), expected) < degrees + 5 * math.sqrt(2 * max(degrees, 1))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0.1, 5),
    st.integers(0, VOCAB),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_token_that_is_filtered_out_is_never_sampled(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = Sampling(temperature, top_p, top_k, min_p)
    logprobs = some_logprobs(seed)
    # Rounding may put the border one token further: allow the float32 neighbourhood of each limit.
    near = Sampling(temperature, min(1.0, top_p + 1e-4), top_k, max(0.0, min_p - 1e-4))
    allowed = set(np.flatnonzero(reference(logprobs, near)))
    assert set(draws(logprobs, params, 64)) <= allowed


@pytest.mark.parametrize("others", [[], [Sampling(top_k=3)], [Sampling(top_p=0.9)], [Sampling()]])
def test_a_top_p_of_zero_is_the_best_token_also_among_equal_ones(others: list[Sampling]) -> None:
    logprobs = np.full((1, VOCAB), -9.0)
    logprobs[0, 5:9] = -1.0
    cold = [Sampling(2.0, top_p=0.0, typical_p=0.2, xtc_probability=1.0, seed=seed) for seed in range(32)]

    tokens = draw(np.repeat(logprobs, 32 + len(others), axis=0), [*cold, *others])

    assert set(tokens[:32]) == {5}


@pytest.mark.parametrize(("suppressed", "best"), [((3, VOCAB), 2), ((VOCAB,), 3), ((-1,), 3)])
def test_suppressed_tokens_outside_of_the_vocabulary_change_nothing(suppressed: tuple[int, ...], best: int) -> None:
    sampler = RowSampler(suppressed=suppressed)
    logprobs = np.full((1, VOCAB), -9.0, dtype=np.float32)
    logprobs[0, 2:4] = -2.0, -1.0
    assert step(sampler, [sampled(Sampling(temperature=0.0))], mx.array(logprobs)) == [best]


def test_top_p_is_of_what_min_p_has_left() -> None:
    logprobs = np.log(np.array([[0.4, 0.3, 0.1, 0.1, 0.1]]))
    assert set(draws(logprobs, Sampling(top_p=0.55, min_p=0.5), 256)) == {0}
    assert set(draws(logprobs, Sampling(top_p=0.55), 256)) == {0, 1}
    assert set(draws(logprobs, Sampling(min_p=0.5), 256)) == {0, 1}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 50), st.floats(0, 1), st.booleans())
def test_the_best_tokens_alone_decide_as_all_of_them_do(seed: int, top_k: int, top_p: float, has_ties: bool) -> None:
    """A companion with top_p alone makes the sampler order all tokens."""
    logprobs = some_logprobs(seed, vocab=700)
    if has_ties:
        logprobs = np.round(logprobs * 2) / 2
    few = [reseeded(Sampling(1.5, top_p, top_k), seed) for seed in range(16)]
    rows = np.repeat(logprobs, 17, axis=0)
    assert draw(rows[:16], few) == draw(rows, [*few, Sampling(top_p=0.5)])[:16]


def test_tokens_at_a_tie_on_the_border_are_kept() -> None:
    logprobs = np.log(np.array([[0.4, 0.2, 0.2, 0.2]]))
    assert set(draws(logprobs, Sampling(top_k=2), 256)) == {0, 1, 2, 3}


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    logprobs = np.array([[-math.inf, -0.7, -math.inf, -0.7]])
    for params in (Sampling(), Sampling(5.0), Sampling(top_k=3), Sampling(top_p=0.99), Sampling(min_p=0.1)):
        assert set(draws(logprobs, params, 256)) == {1, 3}


def test_temperature_zero_is_greedy_whatever_else_is_asked() -> None:
    logprobs = some_logprobs(5, rows=8)
    params = [Sampling(0.0, top_p=0.5, top_k=3, min_p=0.5, seed=seed) for seed in range(8)]
    assert draw(logprobs, params) == logprobs.argmax(axis=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-38, 1e-42, 5e-324])
def test_a_temperature_next_to_zero_is_greedy_too(temperature: float) -> None:
    logprobs = some_logprobs(5, rows=8)
    assert draw(logprobs, [Sampling(temperature, seed=seed) for seed in range(8)]) == logprobs.argmax(axis=-1).tolist()
    filtered = [Sampling(temperature, top_p=0.9, seed=seed) for seed in range(8)]
    assert draw(logprobs, filtered) == logprobs.argmax(axis=-1).tolist()


def test_a_very_high_temperature_is_uniform() -> None:
    expected = np.full(VOCAB, 1 / VOCAB)
    assert chi_square(draws(some_logprobs(1), Sampling(1e6), 4096), expected) < 23 + 5 * math.sqrt(46)


def test_rows_with_different_parameters_get_what_each_gets_alone() -> None:
    rng = np.random.default_rng(11)
    params = [
        Sampling(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
            top_p=float(rng.choice([1.0, 0.9, 0.1])),
            top_k=int(rng.choice([0, 1, 7])),
            min_p=float(rng.choice([0.0, 0.05, 0.5])),
            seed=int(rng.integers(2**62)),
        )
        for _ in range(48)
    ]
    logprobs = some_logprobs(2, rows=48, vocab=300)
    positions = [int(position) for position in rng.integers(0, 5000, 48)]
    together = draw(logprobs, params, positions)
    alone = [draw(logprobs[at : at + 1], [params[at]], [positions[at]])[0] for at in range(48)]
    assert together == alone
    backwards = draw(logprobs[::-1], params[::-1], positions[::-1])
    assert backwards == alone[::-1]


def test_positions_advance_by_one_for_each_call_and_can_start_anywhere() -> None:
    logprobs = some_logprobs(4)
    params = Sampling(1.5, seed=99)
    sampler, row = RowSampler(), sampled(params)
    walked = [step(sampler, [row], mx.array(logprobs)) for _ in range(40)]
    assert [[token] for token in (draw(logprobs, [params], [at])[0] for at in range(40))] == walked
    assert len({token for (token,) in walked}) > 3


def test_a_row_keeps_its_draws_when_companions_come_and_go() -> None:
    logprobs = mx.array(some_logprobs(4))
    sampler = RowSampler()
    row, companion = sampled(Sampling(1.5, seed=5)), sampled(Sampling(0.7, top_k=3, seed=6))
    seen: list[int] = []
    for at in range(12):
        rows = [companion, row] if 3 <= at < 8 else [row]
        seen.append(step(sampler, rows, mx.repeat(logprobs, len(rows), axis=0))[-1])
    assert seen == [draw(some_logprobs(4), [Sampling(1.5, seed=5)], [at])[0] for at in range(12)]


def test_draws_at_successive_positions_of_one_seed_are_independent() -> None:
    probs = np.full((1, 4), 0.25)
    count = 4096
    tokens = draw(np.repeat(np.log(probs), count, axis=0), [Sampling(seed=1)] * count, range(count))
    pairs = [first * 4 + second for first, second in zip(tokens[:-1:2], tokens[1::2], strict=True)]
    assert chi_square(pairs, np.full(16, 1 / 16)) < 15 + 5 * math.sqrt(30)


@pytest.mark.parametrize("seeds", [range(256), range(2**63 - 128, 2**63 + 128), range(-128, 128)])
def test_neighbouring_seeds_and_positions_share_no_key(seeds: range) -> None:
    """Keys that collided would give the same noise: with a flat distribution over many tokens, the same token."""
    vocab = 4096
    flat = np.zeros((256, vocab))
    rows = [draw(flat, [Sampling(seed=seed) for seed in seeds], [at] * 256) for at in (0, 1, 2, 1000)]
    streams = list(zip(*rows, strict=True))
    assert len(set(streams)) == 256
    # Equal tokens at different keys are chance: 1024 draws from 4096 values hit about 115 of them twice.
    assert len({token for row in rows for token in row}) > 800


def test_seeds_beyond_64_bits_are_taken_modulo() -> None:
    logprobs = some_logprobs(4)
    assert draw(logprobs, [Sampling(seed=2**64 + 3)]) == draw(logprobs, [Sampling(seed=3)])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_every_float_type_can_be_sampled_from(dtype: mx.Dtype) -> None:
    rows = [sampled(Sampling(0.8, top_p=0.9, seed=1))]
    (token,) = step(RowSampler(), rows, mx.array(some_logprobs(1)).astype(dtype))
    assert 0 <= token < VOCAB


# -- processors ----------------------------------------------------------------------------------------------------


def processed(params: Sampling, prompt: list[int], output: list[int], logits: Floats) -> Floats:
    result = mx.array(logits.astype(np.float32))[None]
    context = mx.array(prompt + output, dtype=mx.int32)
    for each in processors(params, len(prompt)):
        result = each(context, result)
    return np.array(result[0], dtype=np.float64)


LOGITS = np.array([2.0, -2.0, 0.0, 4.0, -4.0, 1.0])


def test_nothing_asked_means_nothing_done() -> None:
    assert processors(Sampling(), 3) == []


def test_repetition_penalty_weakens_what_prompt_and_output_hold_whatever_its_sign() -> None:
    after = processed(Sampling(repetition_penalty=2.0), [0, 1], [3, 3, 4], LOGITS)
    np.testing.assert_allclose(after, [1.0, -4.0, 0.0, 2.0, -8.0, 1.0])


def test_a_repetition_penalty_below_one_strengthens() -> None:
    after = processed(Sampling(repetition_penalty=0.5), [0], [1], LOGITS)
    np.testing.assert_allclose(after, [4.0, -1.0, 0.0, 4.0, -4.0, 1.0])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("penalty", [get_args(RepetitionPenalty)[1].ge, get_args(RepetitionPenalty)[1].le])
def test_the_limits_of_a_repetition_penalty_leave_log_probabilities(dtype: mx.Dtype, penalty: float) -> None:
    (repetition,) = processors(Sampling(repetition_penalty=penalty), 2)
    logits = repetition(mx.array([0, 1, 2]), mx.array([[40.0, -40.0, 0.0, 4.0]], dtype=dtype)).astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert not mx.any(mx.isnan(logprobs)).item()


def test_presence_and_frequency_count_the_output_and_never_the_prompt() -> None:
    params = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_allclose(processed(params, [0, 0, 1, 3], [], LOGITS), LOGITS)
    after = processed(params, [0, 0, 1, 3], [3, 5, 3, 3], LOGITS)
    np.testing.assert_allclose(after - LOGITS, [0, 0, 0, -0.5 - 0.75, 0, -0.5 - 0.25])


@pytest.mark.parametrize("params", [Sampling(presence_penalty=-2.0), Sampling(frequency_penalty=-2.0)])
def test_negative_penalties_reward(params: Sampling) -> None:
    after = processed(params, [0], [5], LOGITS)
    assert after[5] == LOGITS[5] + 2.0
    np.testing.assert_allclose(after[:5], LOGITS[:5])


def test_bias_is_added_before_penalties() -> None:
    params = Sampling(logit_bias={1: 3.0}, repetition_penalty=2.0)
    after = processed(params, [1], [], LOGITS)
    assert after[1] == (LOGITS[1] + 3.0) / 2.0


def test_a_bias_of_a_hundred_forces_and_of_minus_a_hundred_bans() -> None:
    logprobs = some_logprobs(8)
    best = int(logprobs.argmax())
    for params, check in (
        (Sampling(logit_bias={4: 100.0}), lambda tokens: set(tokens) == {4}),
        (Sampling(logit_bias={best: -100.0}), lambda tokens: best not in tokens),
    ):
        biased = processed(params, [0], [], logprobs[0])[None]
        assert check(draws(biased, Sampling(), 256))


def test_an_empty_bias_of_many_tokens_and_the_last_id_are_in_range() -> None:
    params = Sampling(logit_bias=dict.fromkeys(range(6), 1.0))
    np.testing.assert_allclose(processed(params, [0], [], LOGITS), LOGITS + 1.0)


def test_a_guard_turns_an_exception_into_a_note_and_lets_logits_pass() -> None:
    def explode(context: mx.array, logits: mx.array) -> mx.array:
        raise ValueError("bad")

    guard = Guard(explode)
    logits = mx.array([[1.0, 2.0]])
    assert guard(mx.array([1]), logits).tolist() == [[1.0, 2.0]]
    assert isinstance(guard.error, ValueError)
    first = guard.error
    guard(mx.array([1]), logits)
    assert guard.error is first


# -- filters of the unlikely and of the likely -----------------------------------------------------------------------


def possible(logprobs: Floats, params: Sampling, count: int = 300) -> set[int]:
    """The tokens that many seeds draw."""
    rows = np.repeat(logprobs, count, axis=0)
    return set(draw(rows, [msgspec.structs.replace(params, seed=seed) for seed in range(count)]))


def test_top_n_sigma_keeps_what_is_near_the_best_whatever_the_temperature() -> None:
    logprobs = some_logprobs(3)
    border = logprobs.max() - 1.5 * logprobs.std()
    near = {token for token in range(VOCAB) if logprobs[0, token] >= border}

    for temperature in (0.5, 3.0):
        assert possible(logprobs, Sampling(temperature, top_n_sigma=1.5)) <= near
    assert possible(logprobs, Sampling(20.0, top_n_sigma=1.5)) == near
    forbidden = logprobs.copy()
    forbidden[0, ::2] = -math.inf
    assert possible(forbidden, Sampling(20.0, top_n_sigma=1.0)) <= set(range(1, VOCAB, 2))


@pytest.mark.parametrize("mass", [0.2, 0.6, 0.9])
def test_typical_p_keeps_the_tokens_nearest_to_the_expected_surprise(mass: float) -> None:
    logprobs = some_logprobs(5)
    chances = np.exp(logprobs[0])
    distance = np.abs(-logprobs[0] + (chances * logprobs[0]).sum())
    order = np.argsort(distance)
    before = np.cumsum(chances[order]) - chances[order]
    typical = set(order[before < mass].tolist())

    assert possible(logprobs, Sampling(1.0, typical_p=mass), 600) == typical


def test_xtc_leaves_of_the_likely_tokens_the_least_likely() -> None:
    logprobs = np.log(np.array([[0.4, 0.3, 0.2, 0.07, 0.03]]))

    assert possible(logprobs, Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.15)) == {2, 3, 4}
    assert possible(logprobs, Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.35)) == {0, 1, 2, 3, 4}
    assert possible(logprobs, Sampling(1.0, top_k=2, xtc_probability=1.0, xtc_threshold=0.1)) == {1}


def test_the_coin_of_xtc_falls_as_often_as_it_is_asked_to_and_by_seed_and_position_alone() -> None:
    logprobs = np.log(np.array([[0.9, 0.1]]))
    params = Sampling(1.0, xtc_probability=0.3, xtc_threshold=0.05)
    count = 4000
    rows = np.repeat(logprobs, count, axis=0)
    seeds = [msgspec.structs.replace(params, seed=seed) for seed in range(count)]
    positions = [seed % 5 for seed in range(count)]
    sampled = draw(rows, seeds, positions)

    # Token 0 is drawn in nine of ten cases, but where the coin takes it away.
    assert abs(sampled.count(0) / count - 0.9 * 0.7) < 0.03
    assert draw(rows[:1], seeds[17:18], positions[17:18]) == sampled[17:18]


def test_at_temperature_zero_the_best_token_is_taken_whatever_the_filters_say() -> None:
    logprobs = some_logprobs(9)
    filters = Sampling(0.0, typical_p=0.1, top_n_sigma=0.1, xtc_probability=1.0, xtc_threshold=0.0)

    assert draw(logprobs, [filters]) == [int(logprobs[0].argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_id_beyond_the_table_of_embeddings_is_never_drawn(temperature: float) -> None:
    rows = [sampled(Sampling(temperature=temperature, seed=seed), 0) for seed in range(30)]
    likely = mx.log(mx.array([[0.01] * 6 + [0.47] * 2] * len(rows)))
    assert max(step(RowSampler(table_rows=6), rows, likely)) < 6
