"""The loop of a model of audio: turns, aborts within one, deadlines, and what a successor of a worker sends."""

import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from protocol.failures import Code
from protocol.from_worker import Delta, Drained, Finish, Rejected, Step, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Drain, Shutdown
from tests.support import threads
from tests.support.scale import patient
from worker.audio.audio_jobs import AudioJob, AudioLoop, AudioPiece, SampleMemory
from worker.audio.audio_model import AudioModel
from worker.engine.gauges import Gauges
from worker.errors import RequestInvalid
from worker.turn_loop import LoopCommand

SPEC = WorkerSpec("m", "", 1, "", "", max_running=1, max_waiting=3)


class Harness:
    """A loop on a thread of its own, whose jobs are generators of a test."""

    def __init__(self) -> None:
        self.gauges = Gauges()
        self.room = SampleMemory(100)
        self.sent: list[Up] = []
        self.loop = AudioLoop(AudioModel(Path(), "", 0), SPEC, self._take, self.gauges, self.room)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.loop.run, daemon=True)

    def job(self, rid: int, work: Generator[AudioPiece], **settings: Any) -> AudioJob:
        self.room.take(settings.get("tenant", ""), 10)
        fields: dict[str, Any] = {"input_tokens": 5, "sample_bytes": 10, "heard_s": 1.0, **settings}
        return AudioJob(rid=rid, arrived=time.monotonic(), work=work, **fields)

    def start(self, *commands: AudioJob | LoopCommand) -> None:
        for command in commands:
            self.loop.inbox.put(command)
        self._thread.start()

    def stop(self) -> None:
        self.loop.inbox.put(Shutdown())
        threads.join(self._thread)
        assert not self.room._held, "samples of a job that has ended are still held"

    def _take(self, message: Up) -> None:
        with self._changed:
            self.sent.append(message)
            self._changed.notify_all()

    def deltas(self, rid: int) -> list[Delta]:
        steps = [message for message in self.sent if isinstance(message, Step)]
        return [delta for step in steps for delta in step.deltas if delta.rid == rid]

    def end(self, rid: int) -> Delta:
        def ended() -> bool:
            return any(delta.finish is not None for delta in self.deltas(rid))

        with self._changed:
            assert self._changed.wait_for(ended, patient(10)), self.sent
        return self.deltas(rid)[-1]


@pytest.fixture
def harness() -> Generator[Harness]:
    made = Harness()
    yield made
    made.stop()


def pieces(*texts: str) -> Generator[AudioPiece]:
    for text in texts:
        yield AudioPiece(text, (1, 2), text.encode())


def endless(harness: Harness, began: threading.Event) -> Generator[AudioPiece]:
    """A window that lasts until it is left."""
    began.set()
    while True:
        harness.loop.check()
        time.sleep(0.001)
    yield AudioPiece()


def test_requests_of_two_keys_take_turns_window_by_window(harness: Harness) -> None:
    one = harness.job(1, pieces("a", "b", "c"), tenant="x", heard_s=3.0)
    other = harness.job(2, pieces("d", "e"), tenant="y")
    harness.start(one, other)
    ends = [harness.end(1), harness.end(2)]
    texts = [d.text for m in harness.sent if isinstance(m, Step) for d in m.deltas if d.text]
    assert texts == ["a", "d", "b", "e", "c"]
    assert [end.finish for end in ends] == [Finish.STOP, Finish.STOP]
    usage = ends[0].usage
    assert usage is not None
    assert (usage.prompt, usage.audio_tokens, usage.completion) == (5, 5, 6)
    assert harness.gauges.heard_s == 4.0


def test_an_abort_ends_a_request_within_its_window(harness: Harness) -> None:
    began = threading.Event()
    harness.start(harness.job(1, endless(harness, began)))
    assert began.wait(patient(10))
    harness.loop.inbox.put(Abort((1,)))
    assert harness.end(1).finish is Finish.ABORT
    harness.loop.inbox.put(harness.job(2, pieces("a")))
    assert harness.end(2).finish is Finish.STOP


def test_a_deadline_passes_within_a_window(harness: Harness) -> None:
    harness.start(harness.job(1, endless(harness, threading.Event()), deadline=time.monotonic() + 0.05))
    end = harness.end(1)
    assert end.failure is not None
    assert end.failure.code is Code.DEADLINE_EXCEEDED


def test_a_request_that_fails_fails_alone(harness: Harness) -> None:
    def failing(error: Exception) -> Generator[AudioPiece]:
        yield AudioPiece("a", (1,), b"a")
        raise error

    bad = [RuntimeError("no"), RequestInvalid(Code.ROW_FAILED, "too long", param="input")]
    jobs = [harness.job(rid, failing(error)) for rid, error in enumerate(bad, start=1)]
    harness.start(*jobs, harness.job(3, pieces("b")))
    failures = [harness.end(rid).failure for rid in (1, 2)]
    assert [failure and failure.code for failure in failures] == [Code.ROW_FAILED] * 2
    assert failures[1] is not None
    assert (failures[1].message, failures[1].param) == ("too long", "input")
    assert harness.end(3).finish is Finish.STOP


def test_a_successor_sends_what_the_client_does_not_have(harness: Harness) -> None:
    harness.start(harness.job(1, pieces("a", "b", "c", "d"), already_sent=4))
    end = harness.end(1)
    assert [delta.text for delta in harness.deltas(1)] == ["c", "d", ""]
    assert end.usage is not None
    assert end.usage.completion == 8


def test_a_drain_ends_what_takes_too_long_and_refuses_what_comes(harness: Harness) -> None:
    began = threading.Event()
    harness.start(harness.job(1, endless(harness, began)))
    assert began.wait(patient(10))
    harness.loop.inbox.put(Drain(0.05))
    harness.loop.inbox.put(harness.job(2, pieces("a")))
    end = harness.end(1)
    assert end.failure is not None
    assert end.failure.code is Code.DRAINING
    deadline = time.monotonic() + patient(10)
    while not any(isinstance(message, Drained) for message in harness.sent):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    refused = [message for message in harness.sent if isinstance(message, Rejected)]
    assert [message.rid for message in refused] == [2]
