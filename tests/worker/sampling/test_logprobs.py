"""Log-probabilities: of the token that was really sampled, sorted, aligned with the text that is out."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB
from worker.sampling.logprobs import LogprobReader

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
rids = itertools.count(1)


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[EngineHarness]:
    with EngineHarness(spec(model_folder("qwen3"))) as harness:
        yield harness


def ask(engine: EngineHarness, sampling: Sampling, top: int | None, **settings: object) -> Result:
    rng = random.Random(1)
    prompt = TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(6)))
    request = Generate(next(rids), prompt, sampling, top_logprobs=top, **{"max_tokens": 40, **settings})  # type: ignore[arg-type]
    return engine.run([request])[0]


def token_bytes(engine: EngineHarness, token: int) -> bytes:
    return engine.intake.vocabulary.token_bytes(token)


def reader() -> LogprobReader:
    return LogprobReader(lambda token: str(token).encode())


def test_the_entries_are_those_of_the_distribution() -> None:
    values = np.log(np.random.default_rng(0).dirichlet(np.ones(50))).astype(np.float32)
    (entry,) = reader().read([(7, mx.array(values), 5)])
    best = np.argsort(-values)[:5]
    assert entry.token == b"7"
    assert entry.logprob == pytest.approx(float(values[7]))
    assert [token for token, _ in entry.top] == [str(token).encode() for token in best]
    np.testing.assert_allclose([value for _, value in entry.top], values[best], rtol=1e-6)


@pytest.mark.parametrize("top", [0, 1, 2, 49, 50])
def test_as_many_entries_come_as_were_asked_for(top: int) -> None:
    values = mx.array(np.linspace(-9, -1, 50, dtype=np.float32))
    (entry,) = reader().read([(0, values, top)])
    assert [token for token, _ in entry.top] == [str(token).encode() for token in range(49, 49 - top, -1)]
    assert entry.logprob == -9.0


def test_equal_values_come_in_order_of_their_ids() -> None:
    (entry,) = reader().read([(0, mx.zeros((6,)), 6)])
    assert [token for token, _ in entry.top] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_rows_that_ask_for_different_numbers_are_read_together() -> None:
    values = mx.array(np.linspace(-9, -1, 50, dtype=np.float32))
    first, second, third = reader().read([(1, values, 3), (2, values, 0), (3, values.astype(mx.bfloat16), 1)])
    assert [len(entry.top) for entry in (first, second, third)] == [3, 0, 1]


def test_the_entry_of_each_token_is_of_the_token_that_was_sampled(engine: EngineHarness) -> None:
    result = ask(engine, Sampling(temperature=2.0, seed=3, ignore_eos=True), VOCAB)
    assert len(result.logprobs) == len(result.ids) == 40
    assert [entry.token for entry in result.logprobs] == [token_bytes(engine, token) for token in result.ids]
    for entry in result.logprobs:
        assert (entry.token, entry.logprob) in entry.top
    assert any(entry.token != entry.top[0][0] for entry in result.logprobs), "not only the best were sampled"


def test_the_whole_vocabulary_sums_to_one_and_is_sorted(engine: EngineHarness) -> None:
    result = ask(engine, GREEDY, VOCAB, max_tokens=8)
    for entry in result.logprobs:
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert math.fsum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-4)


def test_the_greedy_token_is_the_first_of_the_top(engine: EngineHarness) -> None:
    for entry in ask(engine, GREEDY, 3).logprobs:
        assert entry.top[0] == (entry.token, entry.logprob)
        assert len(entry.top) == 3


def test_logprobs_do_not_change_with_the_company_nor_with_sampling_parameters(engine: EngineHarness) -> None:
    alone = ask(engine, GREEDY, 2)
    prompt = TokensPrompt((9, 8, 7))
    requests = [Generate(next(rids), prompt, GREEDY, max_tokens=30, top_logprobs=top) for top in (None, 0, 5)]
    rng = random.Random(1)
    same = TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(6)))
    again = Generate(next(rids), same, GREEDY, max_tokens=40, top_logprobs=2)
    *others, company = engine.run([*requests, again])
    assert company.logprobs == alone.logprobs
    assert others[0].logprobs == []
    assert all(entry.top == () for entry in others[1].logprobs)
    assert all(len(entry.top) == 5 for entry in others[2].logprobs)


def test_a_bias_shows_in_the_logprobs_and_temperature_does_not(engine: EngineHarness) -> None:
    forced = ask(engine, Sampling(temperature=0.0, ignore_eos=True, logit_bias={20: 100.0}), 1, max_tokens=2)
    assert forced.logprobs[0].logprob == pytest.approx(0.0, abs=1e-3)
    plain, hot = ask(engine, GREEDY, 1, max_tokens=1), ask(engine, Sampling(5.0, top_k=1), 1, max_tokens=1)
    assert hot.logprobs == plain.logprobs


def test_bytes_of_the_entries_spell_the_text(engine: EngineHarness) -> None:
    result = ask(engine, GREEDY, 0)
    assert b"".join(entry.token for entry in result.logprobs).decode(errors="replace") == result.text


def test_an_end_of_sequence_token_has_no_entry(engine: EngineHarness) -> None:
    eos = engine.loaded.eos_ids[0]
    assert ask(engine, Sampling(temperature=0.0, logit_bias={eos: 100.0}), 2).logprobs == []


@pytest.mark.parametrize("seed", range(6))
def test_the_tokens_of_a_stop_string_have_no_entries(engine: EngineHarness, seed: int) -> None:
    varied = Sampling(temperature=1.5, seed=seed, ignore_eos=True)
    plain = ask(engine, varied, 1)
    begin = len(plain.text) * (seed + 1) // 8
    stop = plain.text[begin : begin + 4]
    stopped = ask(engine, varied, 1, stop=(stop,))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    count = len(stopped.logprobs)
    assert count == len(stopped.ids) > 0
    assert stopped.logprobs == plain.logprobs[:count]
    spelled = [
        b"".join(entry.token for entry in plain.logprobs[:at]).decode(errors="replace") for at in range(count + 1)
    ]
    # Every entry is of a token whose text began before the cut, and no such token lacks its entry.
    assert len(spelled[-2]) < len(stopped.text) <= len(spelled[-1])


@pytest.mark.parametrize("stop", [(), ("xyzzyxyzzy",), ("a" * 40, "kakasenx")])
def test_in_a_stream_no_entry_comes_before_its_text_begins(engine: EngineHarness, stop: tuple[str, ...]) -> None:
    result = ask(engine, Sampling(temperature=1.5, seed=8, ignore_eos=True), 0, stop=stop, max_tokens=80)
    sent, entries = "", list[bytes]()
    for delta in result.deltas:
        sent += delta.text
        for entry in delta.logprobs or ():
            before = b"".join(entries).decode(errors="ignore")
            assert len(before) <= len(sent)
            entries.append(entry.token)
    assert len(entries) == 80
