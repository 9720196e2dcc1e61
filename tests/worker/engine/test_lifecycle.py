"""Every request gets exactly one terminal event, and what it held is free again, in whatever phase it ends."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.failures import Code
from protocol.from_worker import Finish, Progress, Up
from protocol.to_worker import Abort, ChatPrompt, Drain, Generate, Sampling, TextPrompt, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB
from tests.support.scale import patient

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
MAX_RUNNING = 4
rids = itertools.count(1)


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[EngineHarness]:
    """Four rows at a time, chunks of 32; its prefix cache is off so that every prompt is really processed."""
    settings: dict[str, Any] = {"max_running": MAX_RUNNING, "max_waiting": 6, "prefill_chunk": 32, "cache_bytes": 0}
    with EngineHarness(spec(model_folder("qwen3"), **settings)) as harness:
        yield harness


@pytest.fixture(autouse=True)
def leaves_nothing_behind(engine: EngineHarness) -> Iterator[None]:
    yield
    assert_idle(engine)
    assert engine.error is None


def tokens(count: int, seed: int = 0) -> TokensPrompt:
    rng = random.Random(seed)
    return TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(count)))


def endless(prompt_tokens: int = 4, **settings: Any) -> Generate:
    """A request that ends only when something ends it."""
    return Generate(next(rids), tokens(prompt_tokens), ENDLESS, max_tokens=None, **settings)


def short(max_tokens: int | None = 3, **settings: Any) -> Generate:
    return Generate(next(rids), tokens(4), ENDLESS, max_tokens=max_tokens, **settings)


def abort(engine: EngineHarness, *results_rids: int) -> None:
    engine.command(Abort(results_rids))


def decoding(engine: EngineHarness, **settings: Any) -> tuple[int, Result]:
    request = endless(**settings)
    result = engine.submit(request)
    engine.wait(lambda: len(result.ids) > 2, "the first tokens")
    return request.rid, result


def fill(engine: EngineHarness) -> list[int]:
    """Occupy every row; returns the rids."""
    return [decoding(engine)[0] for _ in range(MAX_RUNNING)]


def ended(engine: EngineHarness, result: Result) -> Result:
    engine.wait(lambda: result.terminals, "the terminal event")
    assert result.terminals == 1
    return result


def held_by(engine: EngineHarness) -> tuple[int, int, int, int]:
    stats = engine.gauges.snapshot()
    return stats.running, stats.waiting, stats.kv_bytes, stats.step_age_ms


def assert_idle(engine: EngineHarness) -> None:
    """Nothing runs, nothing waits, no KV is held."""
    deadline = time.monotonic() + patient(10)
    while (held := held_by(engine)) != (0, 0, 0, 0) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert held == (0, 0, 0, 0)
    assert engine.engine._batch.kv_bytes == 0  # pyright: ignore[reportPrivateUsage]
    assert all(result.terminals == 1 for result in engine.results.values())


def test_a_first_step_that_hangs_grows_old_although_no_row_counts_as_running(
    engine: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, may_go_on = engine.engine._batch, threading.Event()  # pyright: ignore[reportPrivateUsage]
    step = batch.step

    def hanging(*args: Any, **kwargs: Any) -> Any:
        may_go_on.wait()
        return step(*args, **kwargs)

    monkeypatch.setattr(batch, "step", hanging)
    result = engine.submit(short())
    deadline = time.monotonic() + patient(10)
    while engine.gauges.snapshot().step_age_ms <= 100:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert engine.gauges.snapshot().running == 0
    may_go_on.set()
    assert ended(engine, result).finish is Finish.LENGTH


# -- aborts --------------------------------------------------------------------------------------------------------


def test_an_abort_while_decoding_ends_the_row_and_keeps_what_it_said(engine: EngineHarness) -> None:
    rid, result = decoding(engine)
    abort(engine, rid)
    ended(engine, result)
    assert result.finish is Finish.ABORT
    assert result.usage is not None
    assert result.usage.completion >= len(result.ids) > 0


def test_an_abort_while_prefilling_ends_the_row_before_the_prompt_is_done(
    engine: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = endless(prompt_tokens=3000, want_progress=True)

    def abort_at_second_chunk(message: Up) -> None:
        if isinstance(message, Progress) and len(engine.results[request.rid].progress) == 2:
            abort(engine, request.rid)

    monkeypatch.setattr(engine, "observe", abort_at_second_chunk)
    result = ended(engine, engine.submit(request))
    assert result.finish is Finish.ABORT
    assert result.progress[-1][0] < 3000
    assert result.ids == []


def test_an_abort_while_waiting_ends_the_row_and_the_next_one_takes_its_place(engine: EngineHarness) -> None:
    running = fill(engine)
    first, second = endless(), short()
    waiting, behind = engine.submit(first), engine.submit(second)
    engine.wait(lambda: behind.accepted, "both to be queued")
    abort(engine, first.rid)
    assert ended(engine, waiting).finish is Finish.ABORT
    assert waiting.usage is not None
    assert waiting.usage.completion == 0
    abort(engine, running[0])
    assert ended(engine, behind).finish is Finish.LENGTH
    abort(engine, *running)


def test_an_abort_that_overtakes_its_request_still_ends_it(engine: EngineHarness) -> None:
    request = endless()
    abort(engine, request.rid)
    assert ended(engine, engine.submit(request)).finish is Finish.ABORT


def test_an_abort_that_overtakes_its_request_is_remembered_by_an_idle_engine(engine: EngineHarness) -> None:
    request = endless()
    abort(engine, request.rid)
    # The engine has handled the abort, and gone idle, by the time that another request is through.
    ended(engine, engine.submit(short()))
    assert_idle(engine)
    assert ended(engine, engine.submit(request)).finish is Finish.ABORT


def test_an_abort_waits_as_long_for_its_request_as_that_is_prepared(
    engine: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = endless()
    abort(engine, request.rid)
    ended(engine, engine.submit(short()))
    monkeypatch.setattr("worker.engine.request_loop.time", SimpleNamespace(monotonic=lambda: time.monotonic() + 3600.0))
    abort(engine, 10**9)
    assert ended(engine, engine.submit(request)).finish is Finish.ABORT


def test_aborts_of_nobody_are_not_remembered_without_bound(engine: EngineHarness) -> None:
    request = endless()
    abort(engine, *range(10**10, 10**10 + 70_000), request.rid)
    assert ended(engine, engine.submit(request)).finish is Finish.ABORT
    assert len(engine.engine._early_aborts) <= 1 << 16  # pyright: ignore[reportPrivateUsage]


def test_a_second_abort_and_an_abort_of_nobody_change_nothing(engine: EngineHarness) -> None:
    rid, result = decoding(engine)
    abort(engine, rid, rid, 10**9)
    abort(engine, rid)
    ended(engine, result)
    assert ended(engine, engine.submit(short())).finish is Finish.LENGTH
    assert result.terminals == 1


def test_an_abort_of_a_finished_request_changes_nothing(engine: EngineHarness) -> None:
    request = short()
    result = ended(engine, engine.submit(request))
    abort(engine, request.rid)
    ended(engine, engine.submit(short()))
    assert (result.terminals, result.finish) == (1, Finish.LENGTH)


def test_aborting_every_row_at_once_leaves_a_working_engine(engine: EngineHarness) -> None:
    requests = [endless(prompt_tokens=size) for size in (4, 900, 4, 900, 4, 900)]
    results = [engine.submit(request) for request in requests]
    engine.wait(lambda: results[0].ids, "a first token")
    abort(engine, *(request.rid for request in requests))
    assert [ended(engine, result).finish for result in results] == [Finish.ABORT] * 6
    assert ended(engine, engine.submit(short())).finish is Finish.LENGTH


def test_a_request_that_comes_twice_has_one_terminal_event(engine: EngineHarness) -> None:
    rid, result = decoding(engine)
    engine.command(engine.intake.row(Generate(rid, tokens(4), ENDLESS, max_tokens=3), time.monotonic()))
    ended(engine, engine.submit(short()))
    abort(engine, rid)
    assert ended(engine, result).finish is Finish.ABORT


# -- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100])
def test_zero_tokens_asked_for_are_zero_tokens_given_after_the_prefill(engine: EngineHarness, size: int) -> None:
    request = Generate(next(rids), tokens(size), ENDLESS, max_tokens=0, want_progress=True)
    result = ended(engine, engine.submit(request))
    assert (result.finish, result.text, result.ids) == (Finish.LENGTH, "", [])
    assert result.usage is not None
    assert (result.usage.prompt, result.usage.completion) == (size, 0)
    assert result.progress[-1] in ((size, size), (size - 1, size))
    assert ended(engine, engine.submit(short())).finish is Finish.LENGTH


def test_zero_tokens_with_echo_give_the_prompt_back(engine: EngineHarness) -> None:
    request = Generate(next(rids), TextPrompt("kato mira"), ENDLESS, max_tokens=0, echo=True)
    result = ended(engine, engine.submit(request))
    assert result.text == "kato mira"
    assert result.usage is not None
    assert (result.usage.completion, result.usage.prompt) == (0, result.accepted)


def test_zero_token_requests_do_not_use_up_the_queue(engine: EngineHarness) -> None:
    running = fill(engine)
    for _ in range(20):
        assert ended(engine, engine.submit(short(0, echo=True))).failure is None
    waiting = engine.submit(short())
    engine.wait(lambda: waiting.accepted)
    abort(engine, *running)
    assert ended(engine, waiting).finish is Finish.LENGTH


@pytest.mark.parametrize("prompt", [TextPrompt("kato mira"), None])
def test_echo_comes_before_the_output(engine: EngineHarness, prompt: TextPrompt | None) -> None:
    ids = tuple(engine.loaded.tokenizer.encode("kato mira"))
    asked = prompt or TokensPrompt(ids)
    plain = ended(engine, engine.submit(Generate(next(rids), asked, ENDLESS, max_tokens=5)))
    echoed = ended(engine, engine.submit(Generate(next(rids), asked, ENDLESS, max_tokens=5, echo=True)))
    assert echoed.text == "kato mira" + plain.text
    assert echoed.ids == plain.ids


def test_a_request_gets_no_more_than_what_is_left_of_the_context(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"), context=48)) as small:
        asked = small.submit(Generate(next(rids), tokens(41), ENDLESS, max_tokens=1000))
        unlimited = small.submit(Generate(next(rids), tokens(41), ENDLESS))
        full = small.submit(Generate(next(rids), tokens(48), ENDLESS, max_tokens=1))
        small.wait(lambda: asked.terminals and unlimited.terminals and full.terminals)
    assert (asked.finish, len(asked.ids)) == (Finish.LENGTH, 7)
    assert unlimited.ids == asked.ids
    assert full.failure is not None
    assert full.failure.code is Code.CONTEXT_LENGTH_EXCEEDED


def test_an_end_of_sequence_token_ends_the_row_and_is_not_part_of_it(engine: EngineHarness) -> None:
    eos = engine.loaded.eos_ids[0]
    forced = Sampling(temperature=0.0, logit_bias={eos: 100.0})
    result = ended(engine, engine.submit(Generate(next(rids), tokens(4), forced, max_tokens=5)))
    assert (result.finish, result.text, result.ids) == (Finish.STOP, "", [])
    assert result.usage is not None
    assert result.usage.completion == 1


def test_an_ignored_end_of_sequence_token_is_a_token_like_any_other(engine: EngineHarness) -> None:
    eos = engine.loaded.eos_ids[0]
    forced = Sampling(temperature=0.0, logit_bias={eos: 100.0}, ignore_eos=True)
    result = ended(engine, engine.submit(Generate(next(rids), tokens(4), forced, max_tokens=5)))
    assert (result.finish, result.text, result.ids) == (Finish.LENGTH, "", [eos] * 5)


def test_usage_counts_what_went_in_and_came_out_and_where_time_went(engine: EngineHarness) -> None:
    result = ended(engine, engine.submit(Generate(next(rids), tokens(70), ENDLESS, max_tokens=9)))
    usage = result.usage
    assert usage is not None
    assert (usage.prompt, usage.completion, usage.cached) == (70, 9, 0)
    assert usage.prompt == result.accepted
    assert usage.queue_ms >= 0
    assert usage.prefill_ms > 0
    assert usage.decode_ms > 0


def test_progress_is_told_in_order_and_only_to_those_who_ask(engine: EngineHarness) -> None:
    asked = engine.submit(Generate(next(rids), tokens(200), ENDLESS, max_tokens=2, want_progress=True))
    silent = engine.submit(Generate(next(rids), tokens(200, seed=1), ENDLESS, max_tokens=2))
    ended(engine, asked)
    ended(engine, silent)
    assert silent.progress == []
    assert asked.progress[-1] == (200, 200)
    assert [done for done, _ in asked.progress] == sorted({done for done, _ in asked.progress})
    assert len(asked.progress) > 2


def test_a_chat_is_rendered_by_the_template_of_the_model(engine: EngineHarness) -> None:
    chat = ChatPrompt([{"role": "user", "content": "kato"}])
    text = "<|im_start|>user\nkato<|im_end|>\n<|im_start|>assistant\n"
    rendered = ended(engine, engine.submit(Generate(next(rids), chat, ENDLESS, max_tokens=4)))
    plain = ended(engine, engine.submit(Generate(next(rids), TextPrompt(text), ENDLESS, max_tokens=4)))
    assert rendered.ids == plain.ids
    assert rendered.accepted == plain.accepted


# -- limits --------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_running_request(engine: EngineHarness) -> None:
    result = ended(engine, engine.submit(endless(deadline_ms=150)))
    assert result.finish is Finish.ERROR
    assert result.failure is not None
    assert result.failure.code is Code.DEADLINE_EXCEEDED


def test_a_deadline_ends_a_waiting_request(engine: EngineHarness) -> None:
    running = fill(engine)
    result = ended(engine, engine.submit(endless(deadline_ms=50)))
    assert result.ids == []
    assert result.failure is not None
    assert result.failure.code is Code.DEADLINE_EXCEEDED
    abort(engine, *running)


def test_a_deadline_ends_a_prefilling_request(engine: EngineHarness) -> None:
    busy = [decoding(engine)[0] for _ in range(3)]
    result = ended(engine, engine.submit(endless(prompt_tokens=4000, deadline_ms=20, want_progress=True)))
    assert result.failure is not None
    assert result.failure.code is Code.DEADLINE_EXCEEDED
    assert result.ids == []
    abort(engine, *busy)


def test_requests_run_by_priority_then_in_order_of_arrival(engine: EngineHarness) -> None:
    running = fill(engine)
    requests = [short(1, priority=priority) for priority in (1, 0, 0, -1)]
    results = [engine.submit(request) for request in requests]
    engine.wait(lambda: all(result.accepted for result in results), "all to be queued")
    # One row is free at a time: the other three stay busy.
    abort(engine, running[0])
    engine.wait(lambda: all(result.terminals for result in results))
    late, first, second, urgent = (request.rid for request in requests)
    assert engine.ended[-4:] == [urgent, first, second, late]
    abort(engine, *running)


def test_requests_of_equal_priority_run_in_turn_by_tenant(engine: EngineHarness) -> None:
    running = fill(engine)
    requests = [short(1, tenant=tenant) for tenant in ("a", "a", "a", "a", "b", "c")]
    results = [engine.submit(request) for request in requests]
    engine.wait(lambda: all(result.accepted for result in results), "all to be queued")
    abort(engine, running[0])
    engine.wait(lambda: all(result.terminals for result in results))
    a1, a2, a3, a4, b, c = (request.rid for request in requests)
    assert engine.ended[-6:] == [a1, b, c, a2, a3, a4]
    abort(engine, *running)


def test_a_full_queue_refuses_and_serves_on(engine: EngineHarness) -> None:
    running = fill(engine)
    waiting = [engine.submit(short()) for _ in range(6)]
    refused = ended(engine, engine.submit(short()))
    assert refused.failure is not None
    assert refused.failure.code is Code.BUSY
    assert refused.failure.is_retryable
    assert refused.accepted is None
    abort(engine, *running)
    assert [ended(engine, result).finish for result in waiting] == [Finish.LENGTH] * 6


# -- drain ---------------------------------------------------------------------------------------------------------


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(engine: EngineHarness) -> None:
    seen = len(engine.drained)
    running = engine.submit(short(200))
    engine.wait(lambda: running.ids)
    engine.command(Drain(30.0))
    refused = ended(engine, engine.submit(short()))
    assert refused.failure is not None
    assert refused.failure.code is Code.DRAINING
    assert ended(engine, running).finish is Finish.LENGTH
    engine.wait(lambda: len(engine.drained) > seen, "Drained")
    assert engine.drained[seen:] == [0]


def test_a_drain_aborts_what_does_not_finish_in_time_and_counts_it(engine: EngineHarness) -> None:
    seen = len(engine.drained)
    results = [engine.submit(endless()) for _ in range(MAX_RUNNING + 1)]
    engine.wait(lambda: results[0].ids)
    engine.command(Drain(0.05))
    for result in results:
        assert ended(engine, result).failure is not None
        assert result.failure is not None
        assert result.failure.code is Code.DRAINING
    engine.wait(lambda: len(engine.drained) > seen, "Drained")
    assert engine.drained[seen:] == [MAX_RUNNING + 1]


def test_a_later_drain_does_not_count_what_an_earlier_one_aborted(engine: EngineHarness) -> None:
    seen = len(engine.drained)
    result = engine.submit(endless())
    engine.wait(lambda: result.ids)
    engine.command(Drain(0.0))
    engine.wait(lambda: len(engine.drained) > seen)
    engine.command(Drain(0.0))
    engine.wait(lambda: len(engine.drained) > seen + 1)
    assert engine.drained[seen:] == [1, 0]


def test_what_came_before_a_drain_ended_is_refused_after_it_too(engine: EngineHarness) -> None:
    """It may still be in the intake then, or at the compiler of its grammar. What comes later is served."""
    seen = len(engine.drained)
    request = short()
    row = engine.intake.row(request, time.monotonic())
    engine.command(Drain(0.0))
    engine.wait(lambda: len(engine.drained) > seen)
    refused = ended(engine, engine.submit_row(row))
    assert refused.failure is not None
    assert refused.failure.code is Code.DRAINING
    assert refused.accepted is None
    assert ended(engine, engine.submit(short())).finish is Finish.LENGTH


# -- isolation -----------------------------------------------------------------------------------------------------


class PanicException(BaseException):
    """A panic in a tokenizer's Rust code, which is no `Exception`."""


@pytest.mark.parametrize("error", [ValueError, PanicException])
def test_a_row_whose_text_cannot_be_decoded_fails_alone(engine: EngineHarness, error: type[BaseException]) -> None:
    class Torn:
        def add(self, token: int) -> str:
            raise error("torn")

        def finish(self) -> str:
            return ""

    rid, healthy = decoding(engine)
    request = endless()
    bad = engine.results[request.rid] = Result()
    row = engine.intake.row(request, time.monotonic())
    row.text.detokenizer = Torn()
    engine.command(row)
    ended(engine, bad)
    assert bad.failure is not None
    assert bad.failure.code is Code.ROW_FAILED
    before = len(healthy.ids)
    engine.wait(lambda: len(healthy.ids) > before + 3, "the healthy row to go on")
    abort(engine, rid)
    ended(engine, healthy)


# -- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_interleaving_of_requests_and_aborts_ends_every_request_once(engine: EngineHarness, seed: int) -> None:
    rng = random.Random(seed)
    sent: list[int] = []
    early: set[int] = set()
    for _ in range(60):
        match rng.choice(["submit", "submit", "submit", "abort", "abort early", "wait"]):
            case "submit":
                request = Generate(
                    next(rids),
                    tokens(rng.choice([1, 2, 31, 32, 33, 150]), seed=rng.randrange(3)),
                    Sampling(temperature=rng.choice([0.0, 1.0]), seed=rng.getrandbits(40)),
                    max_tokens=rng.choice([0, 1, 2, 30]),
                    stop=rng.choice([(), ("a",), ("to", "mira")]),
                    top_logprobs=rng.choice([None, 0, 3]),
                    echo=rng.random() < 0.2,
                    priority=rng.randrange(-1, 2),
                    deadline_ms=rng.choice([0, 0, 1, 15]),
                )
                engine.submit(request)
                sent.append(request.rid)
            case "abort" if sent:
                abort(engine, *rng.choices(sent, k=2))
            case "abort early":
                request = short(30)
                abort(engine, request.rid)
                engine.submit(request)
                early.add(request.rid)
                sent.append(request.rid)
            case _:
                ended(engine, engine.submit(short(1)))
    engine.wait(lambda: all(engine.results[rid].terminals for rid in sent), "every terminal event")
    assert [engine.results[rid].terminals for rid in sent] == [1] * len(sent)
    for rid in early:
        failure = engine.results[rid].failure
        assert engine.results[rid].finish is Finish.ABORT or (failure is not None and failure.code is Code.BUSY)
