"""Stop strings in real generations: never emitted, generation ends there, whatever tokens they span."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from protocol.from_worker import Finish
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB
from tests.support.scale import scaled
from worker.tools.verify.verifier import NoisyDrafts

rids = itertools.count(1)


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[EngineHarness]:
    with EngineHarness(spec(model_folder("qwen3"))) as harness:
        yield harness


def request(seed: int, stop: tuple[str, ...] = (), max_tokens: int = 60) -> Generate:
    rng = random.Random(seed)
    prompt = TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(5)))
    return Generate(
        next(rids), prompt, Sampling(temperature=1.0, seed=seed, ignore_eos=True), max_tokens=max_tokens, stop=stop
    )


def one(engine: EngineHarness, asked: Generate) -> Result:
    return engine.run([asked])[0]


@pytest.mark.parametrize("seed", range(scaled(8, 3)))
def test_a_stop_string_anywhere_in_the_text_ends_it_there(engine: EngineHarness, seed: int) -> None:
    plain = one(engine, request(seed))
    rng = random.Random(seed)
    wanted = [plain.text[at : at + rng.randint(1, 12)] for at in rng.sample(range(len(plain.text) - 1), 4)]
    results = engine.run([request(seed, (stop,)) for stop in wanted])
    for stop, result in zip(wanted, results, strict=True):
        assert result.text == plain.text[: plain.text.index(stop)]
        assert result.finish is Finish.STOP
        assert result.ids == plain.ids[: len(result.ids)]
        assert not any(stop in delta.text for delta in result.deltas)


def test_generation_ends_with_the_token_that_completes_the_stop_string(engine: EngineHarness) -> None:
    plain = one(engine, request(1))
    detokenizer, text, count = engine.intake.vocabulary.detokenizer(), "", 0
    while len(text) < 20:
        text += detokenizer.add(plain.ids[count])
        count += 1
    stopped = one(engine, request(1, (text[-2:],)))
    assert stopped.usage is not None
    assert len(stopped.ids) <= stopped.usage.completion <= count
    # Not one token more than the stop string needs.
    detokenizer = engine.intake.vocabulary.detokenizer()
    said = "".join(detokenizer.add(token) for token in plain.ids[: stopped.usage.completion - 1])
    assert text[-2:] not in said


def test_a_stop_string_of_many_tokens_is_held_back_whole(engine: EngineHarness) -> None:
    plain = one(engine, request(2))
    stop = plain.text[5:45]
    stopped = one(engine, request(2, (stop,)))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert len(stopped.ids) < 8
    assert stopped.usage is not None
    assert stopped.usage.completion > len(stopped.ids)


def test_what_was_held_back_comes_out_when_the_length_ends_the_sequence(engine: EngineHarness) -> None:
    plain = one(engine, request(3))
    almost = plain.text[-10:] + "\x00"
    result = one(engine, request(3, (almost,)))
    assert (result.text, result.finish) == (plain.text, Finish.LENGTH)


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(engine: EngineHarness) -> None:
    plain = one(engine, request(4, max_tokens=12))
    stop = plain.text[-1]
    if stop in plain.text[:-1] or stop == "\ufffd":
        stop = plain.text[-6:]
    result = one(engine, request(4, (stop,), max_tokens=12))
    assert result.finish is Finish.STOP
    assert result.text == plain.text[: plain.text.index(stop)]


def test_a_stop_string_in_the_prompt_does_not_matter(engine: EngineHarness) -> None:
    ids = tuple(engine.loaded.tokenizer.encode("zzzstop"))
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    result = one(engine, Generate(next(rids), TokensPrompt(ids), sampling, max_tokens=5, stop=("zzzstop",), echo=True))
    assert result.text.startswith("zzzstop")
    assert len(result.ids) == 5


def test_the_tokens_of_all_deltas_are_what_the_model_said(engine: EngineHarness) -> None:
    plain = one(engine, request(5))
    held = one(engine, request(5, (plain.text[3:30] + "\x00\x00",)))
    assert held.ids == plain.ids
    assert held.text == plain.text
    assert [token for delta in held.deltas for token in delta.token_ids] == plain.ids


def test_every_sampled_id_is_told_once_and_those_without_text_at_the_end(engine: EngineHarness) -> None:
    plain = one(engine, request(2))
    assert (len(plain.ids), plain.ending_ids) == (60, [])
    results = engine.run([request(2, (plain.text[at : at + 6],)) for at in range(10, 60, 7)])
    assert any(result.ending_ids for result in results)
    for stopped in results:
        assert stopped.usage is not None
        assert [*stopped.ids, *stopped.ending_ids] == plain.ids[: stopped.usage.completion]
    ended = structs.replace(request(2), sampling=Sampling(1.0, seed=2, ignore_eos=True, stop_ids=(plain.ids[7],)))
    at = plain.ids.index(plain.ids[7])
    result = one(engine, ended)
    assert (result.finish, result.ids, result.ending_ids) == (Finish.STOP, plain.ids[:at], [plain.ids[at]])
    eos = engine.loaded.eos_ids[0]
    result = one(engine, structs.replace(request(2), sampling=Sampling(0.0, logit_bias={eos: 100.0})))
    assert (result.ids, result.ending_ids, result.text) == ([], [eos], "")


def test_the_ids_of_a_prompt_come_before_all_output(engine: EngineHarness) -> None:
    asked = structs.replace(request(3, max_tokens=3), prompt_ids=True)
    assert isinstance(asked.prompt, TokensPrompt)
    result = one(engine, asked)
    assert result.prompt_ids == list(asked.prompt.ids)
    assert result.deltas[0].prompt is not None
    assert all(delta.prompt is None for delta in result.deltas[1:])


@pytest.mark.parametrize("stop", [("er",), ("aab", "rr"), ("\n\n###",)])
def test_a_stream_cut_after_any_step_goes_on_as_if_it_had_not_been(
    engine: EngineHarness, stop: tuple[str, ...]
) -> None:
    letters = tuple(engine.loaded.tokenizer.encode("".join(sorted({*"".join(stop), "e"}))))
    for seed in range(4):
        sampling = Sampling(temperature=1.0, seed=seed, ignore_eos=True, allowed_ids=letters)
        asked = structs.replace(request(seed, stop, 40), sampling=sampling, top_logprobs=1)
        whole = one(engine, asked)
        cuts = [(count, text) for count, text in whole.steps[:-1] if count]
        again = [structs.replace(asked, rid=next(rids), resume=tuple(whole.ids[:count])) for count, _ in cuts]
        for (count, text), result in zip(cuts, engine.run(again), strict=True):
            assert (text + result.text, result.ids, result.finish) == (whole.text, whole.ids[count:], whole.finish)
            assert (result.logprobs, result.ending_ids) == (whole.logprobs[count:], whole.ending_ids)
            assert result.usage is not None
            assert whole.usage is not None
            assert result.usage.completion == whole.usage.completion


# -- special tokens without text ---------------------------------------------------------------------------------------

BEGIN = "<|im_start|>"


def marked_request(engine: EngineHarness, seed: int, stop: tuple[str, ...] = (), **fields: Any) -> Generate:
    """A request whose output has letters and special tokens."""
    tokenizer = engine.loaded.tokenizer
    ids = (*tokenizer.encode("abe \n"), tokenizer.convert_tokens_to_ids(BEGIN))
    sampling = Sampling(temperature=1.5, seed=seed, ignore_eos=True, allowed_ids=ids)
    return structs.replace(request(seed, stop, 40), sampling=sampling, **fields)


def named(engine: EngineHarness, ids: list[int]) -> str:
    """The text of these ids, with the names of special tokens."""
    detokenizer = engine.intake.vocabulary.with_special.detokenizer()
    return "".join(detokenizer.add(token) for token in ids) + detokenizer.finish()


STOPS = [(BEGIN,), (f"{BEGIN}a",), (f"a{BEGIN}",), (f"{BEGIN}{BEGIN}",), ("bb", f"e{BEGIN}b"), (f"x{BEGIN}",)]


@pytest.mark.parametrize("stop", STOPS)
def test_a_special_token_in_a_stop_string_counts_although_it_has_no_text(
    engine: EngineHarness, stop: tuple[str, ...]
) -> None:
    plain = engine.run([marked_request(engine, seed) for seed in range(8)])
    results = engine.run([marked_request(engine, seed, stop) for seed in range(8)])
    assert any(BEGIN in named(engine, each.ids) for each in plain)
    for whole, result in zip(plain, results, strict=True):
        text = named(engine, whole.ids)
        found = [(text.index(each) + len(each), text.index(each), each) for each in stop if each in text]
        _, at, hit = min(found, default=(0, len(text), ""))
        assert result.text == text[:at].replace(BEGIN, "")
        assert result.finish is (Finish.STOP if found else Finish.LENGTH)
        assert result.deltas[-1].stop == hit
        assert [*result.ids, *result.ending_ids] == whole.ids[: len(result.ids) + len(result.ending_ids)]


@pytest.mark.parametrize("stop", STOPS)
def test_a_stream_that_such_a_stop_string_ends_goes_on_after_any_step(
    engine: EngineHarness, stop: tuple[str, ...]
) -> None:
    for seed in range(3):
        asked = marked_request(engine, seed, stop, top_logprobs=1)
        whole = one(engine, asked)
        cuts = [(count, text) for count, text in whole.steps[:-1] if count]
        again = [structs.replace(asked, rid=next(rids), resume=tuple(whole.ids[:count])) for count, _ in cuts]
        for (count, text), result in zip(cuts, engine.run(again), strict=True):
            assert (text + result.text, result.ids, result.finish) == (whole.text, whole.ids[count:], whole.finish)
            assert (result.logprobs, result.ending_ids) == (whole.logprobs[count:], whole.ending_ids)


def test_a_stop_string_with_a_special_token_is_shown_where_it_is_wanted(engine: EngineHarness) -> None:
    for seed in range(4):
        text = named(engine, one(engine, marked_request(engine, seed)).ids)
        hidden = one(engine, marked_request(engine, seed, (f"{BEGIN}a",)))
        shown = one(engine, marked_request(engine, seed, (f"{BEGIN}a",), includes_stop=True))
        special = one(engine, marked_request(engine, seed, (f"{BEGIN}a",), shows_special=True))
        if hidden.finish is Finish.STOP:
            assert shown.text == f"{hidden.text}{BEGIN}a"
            assert special.text == text[: text.index(f"{BEGIN}a")]
        late = marked_request(engine, seed, (BEGIN,))
        late = one(engine, structs.replace(late, sampling=structs.replace(late.sampling, min_tokens=30)))
        assert len(late.ids) + len(late.ending_ids) > 30


def test_a_stop_string_that_is_a_special_token_ends_drafted_text_too(model_folder: Callable[[str], Path]) -> None:
    drafter = NoisyDrafts(VOCAB)
    with EngineHarness(spec(model_folder("qwen3")), drafter=drafter) as engine:
        batch = [marked_request(engine, seed, STOPS[seed % len(STOPS)]) for seed in range(12)]
        plain = engine.run([structs.replace(each, rid=next(rids), stop=(), most_drafted=0) for each in batch])
        for asked, whole in zip(batch, plain, strict=True):
            assert isinstance(asked.prompt, TokensPrompt)
            drafter.learn([*asked.prompt.ids, *whole.ids])
        alone = engine.run([structs.replace(each, rid=next(rids), most_drafted=0) for each in batch])
        before = drafter.accepted
        drafted = engine.run(batch)
    assert drafter.accepted > before
    assert [(each.text, each.finish, each.ids) for each in drafted] == [
        (each.text, each.finish, each.ids) for each in alone
    ]
