"""Fields of a request that limit its tokens or its end, in a running engine."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from msgspec import structs

from protocol.failures import Code
from protocol.from_worker import Finish
from protocol.to_worker import Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB
from worker.errors import RequestInvalid
from worker.prompt.limits_and_truncation import check_limits
from worker.sampling.penalties import BadWords

rids = itertools.count(1)


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[EngineHarness]:
    with EngineHarness(spec(model_folder("qwen3"))) as harness:
        yield harness


def request(seed: int, max_tokens: int = 24, stop: tuple[str, ...] = (), **sampling: Any) -> Generate:
    rng = random.Random(seed)
    prompt = TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(rng.choice([3, 9, 40]))))
    params = Sampling(**{"temperature": 1.0, "seed": seed, "ignore_eos": True} | sampling)
    return Generate(next(rids), prompt, params, max_tokens=max_tokens, stop=stop)


def run(engine: EngineHarness, asked: Generate) -> Result:
    return engine.run([asked])[0]


FIELDS: tuple[dict[str, Any], ...] = (
    {"top_n_sigma": 1.0},
    {"typical_p": 0.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"dry_multiplier": 20.0, "dry_breakers": ("\n",), "dry_allowed_length": 0},
    {"repetition_penalty": 1.3, "penalty_window": 5},
    {"allowed_ids": tuple(range(20, 40))},
    {"bad_words": (*ascii_lowercase, "ka", "to", "mi", "ra", "lu", "vi", "de", "an")},
    {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 0},
    {
        "top_n_sigma": 2.0,
        "typical_p": 0.9,
        "xtc_probability": 0.9,
        "xtc_threshold": 0.001,
        "top_p": 0.95,
        "min_p": 0.01,
        "frequency_penalty": 0.2,
        "penalty_window": 8,
        "dry_multiplier": 0.5,
    },
)


def test_each_field_is_exact_alone_in_company_and_resumed(engine: EngineHarness) -> None:
    batch = [request(seed, **fields) for seed, fields in enumerate(FIELDS)]
    plain = [request(seed, temperature=fields.get("temperature", 1.0)) for seed, fields in enumerate(FIELDS)]
    alone = [run(engine, asked).ids for asked in batch]
    together = [result.ids for result in engine.run([*batch, *plain])]

    assert together[: len(batch)] == alone
    same = [
        FIELDS[at]
        for at, (own, plain_ids) in enumerate(zip(alone, together[len(batch) :], strict=True))
        if own == plain_ids
    ]
    assert same == [], "each of them must change something"
    for asked, ids in zip(batch, alone, strict=True):
        rest = run(engine, structs.replace(asked, rid=next(rids), resume=tuple(ids[:7])))
        assert ids[:7] + rest.ids == ids


def test_a_stop_id_ends_the_output_without_its_text_unless_that_is_asked_for(engine: EngineHarness) -> None:
    plain = run(engine, request(3))
    at = next(at for at in range(3, 20) if plain.ids.index(plain.ids[at]) == at)
    detokenizer = engine.intake.vocabulary.detokenizer()
    before = "".join(detokenizer.add(token) for token in plain.ids[:at])
    stopped = run(engine, request(3, stop_ids=(plain.ids[at],)))
    whole = run(engine, structs.replace(request(3, stop_ids=(plain.ids[at],)), includes_stop=True))

    assert (stopped.ids, stopped.finish) == (plain.ids[:at], Finish.STOP)
    assert stopped.text.removesuffix("\ufffd") == before
    assert whole.finish is Finish.STOP
    assert len(whole.text) > len(before)
    assert plain.text.startswith(whole.text.removesuffix("\ufffd"))


def test_an_included_stop_string_is_the_end_of_the_text(engine: EngineHarness) -> None:
    plain = run(engine, request(4, max_tokens=60))
    stop = plain.text[9:13]
    included = run(engine, structs.replace(request(4, max_tokens=60, stop=(stop,)), includes_stop=True))

    assert included.text == plain.text[: plain.text.index(stop) + len(stop)]


def test_nothing_ends_the_output_before_its_least_tokens(engine: EngineHarness) -> None:
    plain = run(engine, request(5))
    first, twelfth = plain.ids[0], plain.ids[12]
    held = run(engine, request(5, min_tokens=12, stop_ids=(first, twelfth)))
    assert held.usage is not None
    assert held.usage.completion >= 12
    assert first not in held.ids[:12]

    stop = plain.text[2:4]
    text = run(engine, request(5, min_tokens=10, stop=(stop,)))
    assert text.ids[:10] == plain.ids[:10]
    assert stop in text.text


def test_a_bad_word_does_not_come_whole(engine: EngineHarness) -> None:
    plain = run(engine, request(6, max_tokens=40))
    word = engine.intake.vocabulary.decode(plain.ids[5:7])
    without = run(engine, request(6, max_tokens=40, bad_words=(word,)))

    ids = tuple(plain.ids[5:7])
    assert without.ids[:6] == plain.ids[:6]
    assert ids not in set(itertools.pairwise(without.ids))


@pytest.mark.parametrize("sampling", [{"min_tokens": 2}, {"allowed_ids": (1,)}, {"bad_words": ("x",)}])
def test_what_could_leave_a_grammar_no_token_is_refused(engine: EngineHarness, sampling: dict[str, Any]) -> None:
    constraint = Constraint(ConstraintKind.REGEX, "[a-z]+")
    with pytest.raises(RequestInvalid) as refused:
        engine.intake.row(structs.replace(request(1, **sampling), constraint=constraint), 0.0)
    assert refused.value.failure.code is Code.INVALID_REQUEST


@pytest.mark.parametrize("sampling", [{"stop_ids": (VOCAB + 1000,)}, {"allowed_ids": (-1,)}])
def test_ids_outside_of_the_vocabulary_are_refused(engine: EngineHarness, sampling: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid, match="outside of the model's vocabulary"):
        engine.intake.row(request(1, **sampling), 0.0)


def test_limits_that_could_leave_no_token_are_refused(engine: EngineHarness) -> None:
    """The letters of the words are tokens, as they are behind a space."""
    (eos, *_), words = engine.loaded.eos_ids, engine.intake.row(request(1, bad_words=("a", "e")), 0.0).words.bad
    letters = tuple(word[-1] for word in words)
    for param, sampling in (
        ("min_tokens", {"allowed_ids": (eos,), "min_tokens": 1}),
        ("min_tokens", {"allowed_ids": (eos, 30), "stop_ids": (30,), "min_tokens": 1}),
        ("bad_words", {"allowed_ids": letters, "bad_words": ("a", "e")}),
        ("bad_words", {"allowed_ids": (eos, *letters), "bad_words": ("a", "e"), "min_tokens": 1}),
    ):
        with pytest.raises(RequestInvalid) as refused:
            engine.intake.row(request(1, **sampling), 0.0)
        assert (refused.value.failure.code, refused.value.failure.param) == (Code.INVALID_REQUEST, param)
    for sampling in (
        {"allowed_ids": (eos,), "ignore_eos": False},
        {"allowed_ids": (eos, 30), "min_tokens": 1},
        {"allowed_ids": (eos, *letters), "bad_words": ("a", "e")},
    ):
        assert run(engine, request(1, max_tokens=3, **sampling)).finish in (Finish.STOP, Finish.LENGTH)


def test_words_of_several_tokens_are_refused_where_one_text_forbids_all_that_may_come() -> None:
    def check(*bad: tuple[int, ...]) -> None:
        check_limits(Sampling(allowed_ids=(7, 8)), BadWords(bad), (), (), VOCAB)

    for bad in (((7,), (8,)), ((7, 7), (8,)), ((9, 7, 8), (7, 7)), ((7, 7), (7, 8))):
        with pytest.raises(RequestInvalid, match="bad_words forbids all"):
            check(*bad)
    check((7, 7), (8, 8))
    check((7, 7, 8), (8, 7))
    check((8,))
