"""Forward passes that keep an idle model warm, and leave no other trace."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.stats import Stats
from protocol.to_worker import Generate, Sampling, SetMemory, SetPace, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.scale import patient
from worker.engine.inbox import Command, WakeUp
from worker.engine.scheduling import pacing
from worker.engine.scheduling.pacing import INTERVAL_S, Heartbeat
from worker.kv.quantized import make_caches

KEEP_S = 300.0


class Beating:
    """An engine that counts its beats, and whose heartbeat has a clock that stands still."""

    def __init__(self, engine: EngineHarness) -> None:
        self.beats = 0
        self.now = 0.0
        self.engine = engine

    def make_caches(self, model: Any) -> list[Any]:
        """The caches of a beat, each of which makes its own."""
        with self.engine.changed:
            self.beats += 1
            self.engine.changed.notify_all()
        return make_caches(model)

    def wait_for_beats(self) -> None:
        before = self.beats
        self.engine.wait(lambda: self.beats > before + 3, "heartbeats")

    def assert_quiet(self) -> None:
        """The engine handles two requests without a beat before, between and after them."""
        self.engine.run([request(90)])
        before = self.beats
        for rid in (91, 92):
            self.engine.run([request(rid)])
        assert self.engine.engine.heartbeat._left_s() is None
        assert self.beats == before


@contextmanager
def beating(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keep_s: float = KEEP_S, interval_s: float = 0.01
) -> Iterator[Beating]:
    with EngineHarness(spec(folder, keep_warm_s=keep_s, cache_bytes=1 << 28, speculate="off")) as engine:
        model = Beating(engine)
        monkeypatch.setattr(pacing, "INTERVAL_S", interval_s)
        monkeypatch.setattr(pacing, "make_caches", model.make_caches)
        engine.engine.heartbeat.clock = lambda: model.now
        yield model


def request(rid: int, output: int = 12) -> Generate:
    prompt = TokensPrompt(tuple(20 + (rid % 7 * 31 + at * 7) % 400 for at in range(40)))
    return Generate(rid, prompt, Sampling(temperature=0.8, seed=5, ignore_eos=True), max_tokens=output)


def test_an_idle_model_beats_after_its_first_request_until_its_time_is_over(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with beating(model_folder("qwen3"), monkeypatch) as model:
        beat = model.engine.engine.heartbeat
        assert beat._left_s() is None, "a model that was not used"
        model.engine.run([request(1)])
        model.wait_for_beats()
        model.now = KEEP_S - 1
        model.wait_for_beats()
        model.now = KEEP_S + 1
        model.engine.submit(request(2))
        model.engine.wait(lambda: model.engine.results[2].terminals, "an answer")
        model.wait_for_beats()
        monkeypatch.setattr(pacing, "INTERVAL_S", KEEP_S + 1)
        model.assert_quiet()


def test_beats_are_due_at_their_interval_after_work_until_the_time_is_over() -> None:
    now = 100.0
    beat = Heartbeat(None, 10.0, lambda: now)
    waited: list[float | None] = []

    def receive(idle_s: float | None) -> list[Command]:
        nonlocal now
        waited.append(idle_s)
        now += idle_s or 0.0
        return [] if idle_s is not None else [WakeUp.UP]

    def guard(act: Callable[[], None]) -> None:
        nonlocal now
        now += 0.25
        beat._beat_at = now

    assert beat.receive(receive, guard, is_idle=True) == [WakeUp.UP]
    assert waited == [None], "no work yet"
    waited.clear()
    assert beat.receive(receive, guard, is_idle=False) == [WakeUp.UP]
    waited.clear()
    beat.receive(receive, guard, is_idle=True)
    assert waited == [INTERVAL_S] * 5 + [None]
    assert now <= 110.0


def test_no_beat_follows_a_sleep_of_the_machine_that_was_longer_than_the_time() -> None:
    now = 0.0
    beat = Heartbeat(lambda *_: pytest.fail("a pass"), 10.0, lambda: now)
    beat.receive(lambda _: [WakeUp.UP], lambda act: act(), is_idle=False)
    now = 100.0
    beat._beat()
    assert beat._left_s() is None


@pytest.mark.parametrize(
    ("off", "on"),
    [
        (SetPace(may_keep_warm=False), SetPace()),
        (SetMemory(1 << 40, 1.0, 0.25), SetMemory(1 << 40)),
    ],
    ids=["battery", "pressure"],
)
def test_there_are_no_beats_on_battery_or_without_memory(
    off: Any, on: Any, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with beating(model_folder("qwen3"), monkeypatch) as model:
        model.engine.run([request(1)])
        model.wait_for_beats()
        model.engine.command(off)
        model.assert_quiet()
        model.engine.command(on)
        model.wait_for_beats()


def test_a_model_without_the_setting_never_beats(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with beating(model_folder("qwen3"), monkeypatch, keep_s=0.0) as model:
        model.assert_quiet()


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_requests_between_and_during_beats_have_their_tokens_and_nothing_else_sees_a_beat(
    architecture: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(architecture)
    with beating(folder, monkeypatch, keep_s=0.0) as model:
        alone = [model.engine.run([request(rid)])[0].ids for rid in range(1, 6)]
        quiet = facts(model.engine)
    with beating(folder, monkeypatch, interval_s=0.0) as model:
        ids: list[list[int]] = []
        for rid in range(1, 6):
            ids.append(model.engine.run([request(rid)])[0].ids)
            model.wait_for_beats()
        assert facts(model.engine) == quiet
        assert model.engine.gauges.busy_since == 0.0, "an idle engine, whatever beats"
    assert ids == alone


def facts(engine: EngineHarness) -> tuple[int, int, int, int, Stats]:
    gauges, cache = engine.gauges, engine.engine.cache
    # The KV of a row that has ended is stored after its answer was sent, before the loop is idle.
    end = time.monotonic() + patient(10)
    while gauges.busy_since:
        assert time.monotonic() < end, "the loop is not idle"
        time.sleep(0.001)
    return gauges.prompt_tokens, gauges.generation_tokens, gauges.step_seq, cache.nbytes, cache.counts


def test_an_error_of_a_beat_ends_no_later_request(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("qwen3")
    with beating(folder, monkeypatch) as model:
        failed: list[int] = []

        def failing(loaded: Any) -> list[Any]:
            if not failed:
                failed.append(1)
                raise RuntimeError("[malloc] Unable to allocate 7 bytes.")
            return model.make_caches(loaded)

        monkeypatch.setattr(pacing, "make_caches", failing)
        first = model.engine.run([request(1)])[0]
        model.wait_for_beats()
        second = model.engine.run([request(8)])[0]
    assert failed
    assert first.ids == second.ids
