"""Token equality: a request's output is its own, whoever it shares the batch with."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec import structs

from protocol.failures import Code
from protocol.to_worker import Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import ARCHITECTURES, LANES, SAMPLE, VOCAB, Breakable, build
from tests.support.scale import scaled

GREEDY = Sampling(temperature=0.0)


def requests(count: int) -> list[Generate]:
    """Mixed lengths; every other one sampled with its own seed and filters."""
    rng = random.Random(7)
    made: list[Generate] = []
    for rid in range(count):
        prompt = tuple(rng.randrange(10, VOCAB) for _ in range(rng.choice([1, 2, 7, 33, 70, 150])))
        sampled = Sampling(
            temperature=rng.choice([0.7, 1.0, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 5, 40]),
            min_p=rng.choice([0.0, 0.02]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=rng.getrandbits(63),
        )
        made.append(
            Generate(rid, TokensPrompt(prompt), sampled if rid % 2 else GREEDY, max_tokens=rng.choice([1, 5, 20, 40]))
        )
    return made


def tokens(result: Result) -> tuple[object, ...]:
    return result.ids, result.text, result.finish


# The seeds of tests/simulation/engine play plain, windowed and recurrent caches in `make test`.
@pytest.mark.parametrize("architecture", scaled([*SAMPLE, *LANES], ["mamba"]))
def test_sixteen_staggered_requests_equal_each_alone(architecture: str, model_folder: Callable[[str], Path]) -> None:
    batch = requests(16)
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=64)) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
        results: list[Result] = []
        for request in batch:
            seen = engine.gauges.step_seq
            results.append(engine.submit(request))
            # The next one joins only after the engine has moved on: prefill and decode overlap.
            engine.wait(lambda seen=seen, result=results[-1]: engine.gauges.step_seq > seen or result.terminals)
        engine.wait(lambda: all(result.terminals for result in results))
    assert [tokens(result) for result in results] == alone
    assert len({tuple(result.ids) for result in results}) > 8, "the models must not all say the same"


def test_chunk_size_does_not_change_tokens(model_folder: Callable[[str], Path]) -> None:
    batch = requests(8)
    outcomes: list[list[tuple[object, ...]]] = []
    for chunk in (32, 512):
        with EngineHarness(spec(model_folder("qwen3_5"), prefill_chunk=chunk)) as engine:
            outcomes.append([tokens(result) for result in engine.run(batch)])
    assert outcomes[0] == outcomes[1]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_does_not(model_folder: Callable[[str], Path]) -> None:
    prompt = TokensPrompt((20, 30, 40))

    def sampled(rid: int, seed: int) -> Generate:
        return Generate(rid, prompt, Sampling(temperature=1.5, seed=seed), max_tokens=24)

    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        first, again, other = engine.run([sampled(1, 5), sampled(2, 5), sampled(3, 6)])
    assert first.ids == again.ids
    assert first.ids != other.ids


def test_a_failing_row_fails_alone_and_the_others_keep_their_tokens(model_folder: Callable[[str], Path]) -> None:
    def explode(context: object, logits: object) -> object:
        raise RuntimeError("a bad processor")

    batch = requests(6)
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
        bad = engine.submit(Generate(99, TokensPrompt((20, 21, 22)), GREEDY, max_tokens=40), processors=[explode])
        results = engine.run(batch)
        engine.wait(lambda: bad.terminals == 1)
    assert bad.failure is not None
    assert bad.failure.detail == "RuntimeError: a bad processor"
    assert [tokens(result) for result in results] == alone


BAD_LOGITS: list[Callable[[mx.array], object]] = [
    lambda logits: mx.concatenate([logits, logits]),
    lambda logits: logits[:, :-1],
    lambda logits: logits[0],
    lambda logits: logits.astype(mx.float16),
    lambda logits: logits.tolist(),
    lambda logits: None,
]


def spoiled(spoil: Callable[[mx.array], object], _context: mx.array, logits: mx.array) -> object:
    return spoil(logits)


@pytest.mark.parametrize("is_beside_a_grammar", [False, True])
def test_logits_of_a_wrong_kind_fail_their_row_alone(
    is_beside_a_grammar: bool, model_folder: Callable[[str], Path]
) -> None:
    batch = requests(4)
    if is_beside_a_grammar:  # such steps are launched in another way
        grammar = Constraint(ConstraintKind.REGEX, "[a-z ]+")
        batch[3] = structs.replace(batch[3], constraint=grammar, max_tokens=40)
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
        results = [engine.submit(request) for request in batch]
        bad = [
            engine.submit(
                Generate(90 + at, TokensPrompt((20, 21, 22 + at)), GREEDY, max_tokens=40),
                processors=[partial(spoiled, spoil)],
            )
            for at, spoil in enumerate(BAD_LOGITS)
        ]
        engine.wait(lambda: all(result.terminals for result in (*bad, *results)))
        assert engine.error is None
    assert all(result.failure and "a processor returned" in result.failure.detail for result in bad)
    assert [tokens(result) for result in results] == alone


def test_an_exception_in_a_step_rebuilds_the_batch_and_every_row_goes_on_exactly(
    model_folder: Callable[[str], Path],
) -> None:
    batch = requests(6)
    with EngineHarness(spec(model_folder("qwen3")), wrap=Breakable) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
        results = [engine.submit(request) for request in batch]
        engine.wait(lambda: sum(len(result.ids) for result in results) > 20)
        engine.loaded.model.faults = 1
        engine.wait(lambda: all(result.terminals for result in results))
    assert [tokens(result) for result in results] == alone


def test_rows_that_ended_in_a_step_that_then_failed_still_end(model_folder: Callable[[str], Path]) -> None:
    endless = Sampling(temperature=0.0, ignore_eos=True)
    ending = [Generate(rid, TokensPrompt((20, 21, 22 + rid)), endless, max_tokens=5) for rid in (1, 2, 3)]
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        alone = [tokens(engine.run([request])[0]) for request in ending]
        engine.results.clear()
        batch = engine.engine._batch  # pyright: ignore[reportPrivateUsage]
        park, failed = batch._park, list[str]()  # pyright: ignore[reportPrivateUsage]

        def submit(context: mx.array, logits: mx.array) -> mx.array:
            """Between two steps, so that all three begin and end in the same ones."""
            if len(context) == 8:
                for request in ending:
                    engine.submit(request)
            return logits

        def fail_once() -> None:
            have_begun = all(request.rid in engine.results and engine.results[request.rid].ids for request in ending)
            if have_begun and len(batch) == 1 and not failed:
                failed.append("when the three had ended")
                raise RuntimeError("a step failed")
            park()

        batch._park = fail_once  # pyright: ignore[reportPrivateUsage]
        engine.submit(Generate(9, TokensPrompt((20, 21)), endless, max_tokens=40), processors=[submit])
        engine.wait(lambda: len(engine.ended) == 7, "every terminal event")
        assert engine.error is None
    assert [tokens(engine.results[request.rid]) for request in ending] == alone
    assert failed


def test_a_second_failure_ends_the_loop_with_one_terminal_event_for_each_row(
    model_folder: Callable[[str], Path],
) -> None:
    with EngineHarness(spec(model_folder("qwen3")), wrap=Breakable) as engine:
        results = [engine.submit(request) for request in requests(4)]
        engine.loaded.model.faults = 5
        engine.wait(lambda: all(result.terminals == 1 for result in results))
        engine.wait(lambda: engine.error is not None)
    assert all(result.failure is not None for result in results if not result.ids)


def test_a_device_that_cannot_even_be_let_go_of_ends_every_row_once(model_folder: Callable[[str], Path]) -> None:
    """After a GPU fault, waiting for the device raises as well."""

    def close() -> None:
        raise RuntimeError("[METAL] Command buffer execution failed")

    with EngineHarness(spec(model_folder("qwen3")), wrap=Breakable) as engine:
        engine.engine._batch.close = close  # pyright: ignore[reportPrivateUsage]
        results = [engine.submit(request) for request in requests(4)]
        engine.loaded.model.faults = 1
        engine.wait(lambda: all(result.terminals == 1 for result in results))
        engine.wait(lambda: engine.error is not None)


@pytest.mark.parametrize("architecture", scaled(["qwen3", "gemma3_text", "qwen3_5"], ["gemma3_text"]))
def test_a_request_resumed_after_any_number_of_tokens_goes_on_with_the_same_text(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    whole = [structs.replace(request, max_tokens=20, stop=("zz", "\n\n")) for request in requests(4)]
    with EngineHarness(spec(model_folder(architecture))) as engine:
        for request, result in zip(whole, engine.run(whole), strict=True):
            for count, text in result.steps[: -1 : scaled(1, 3)]:
                rest = engine.run([structs.replace(request, rid=1000 + count, resume=tuple(result.ids[:count]))])[0]
                assert result.ids[:count] + rest.ids == result.ids
                assert text + rest.text == result.text
                assert rest.finish == result.finish
                assert rest.usage is not None
                assert result.usage is not None
                assert rest.usage.completion == result.usage.completion


def test_a_stream_of_a_model_with_a_padded_vocabulary_is_resumed_after_any_id_that_it_sampled(tmp_path: Path) -> None:
    """Of the two sizes that its configuration names, the table of embeddings has the larger."""
    rows = VOCAB + 256
    text_config = {**ARCHITECTURES["qwen3_5"][1]["text_config"], "vocab_size": rows}
    folder = build("qwen3_5", tmp_path / "padded", text_config=text_config)
    sampling = Sampling(temperature=1.0, seed=5, ignore_eos=True)
    asked = Generate(1, TokensPrompt(tuple(range(20, 30))), sampling, 24)
    with EngineHarness(spec(folder)) as engine:
        (whole,) = engine.run([asked])
        assert (engine.loaded.vocab_size, engine.loaded.table_rows) == (VOCAB, rows)
        assert any(token >= VOCAB for token in whole.ids), "the seed samples none of the padding"
        had = range(1, len(whole.ids))
        resumed = [structs.replace(asked, rid=100 + each, resume=tuple(whole.ids[:each])) for each in had]
        for count, rest in zip(had, engine.run(resumed), strict=True):
            assert (rest.failure, whole.ids[:count] + rest.ids) == (None, whole.ids)
        (beyond,) = engine.run([structs.replace(asked, rid=2, resume=(rows,))])
        assert beyond.failure is not None
        assert (beyond.failure.code, beyond.failure.param) == (Code.INVALID_REQUEST, "resume")
        (given,) = engine.run([structs.replace(asked, rid=3, prompt=TokensPrompt((VOCAB,)))])
        assert given.failure is not None, "what a client writes is of the vocabulary"
