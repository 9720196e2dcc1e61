"""Clips that wait to be decoded: room, order, aborts, deadlines and drains, with a real model and real files."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import BytesIO
from queue import Empty, SimpleQueue
from typing import Any, Final

import av
import numpy as np
import pytest

from protocol.failures import Code
from protocol.from_worker import Delta, Finish, Rejected, Step, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Drain, Generate, Sampling, Shutdown, TranscribePrompt
from tests.support import threads
from tests.support.audio_models import build_moonshine, tone
from tests.support.scale import patient
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_jobs import AudioJob, AudioLoop, ClipQueue, SampleMemory, bytes_for_clips
from worker.audio.audio_model import AudioModel, load_audio_model
from worker.engine.gauges import Gauges
from worker.errors import RequestInvalid

SPEC: Final = WorkerSpec("m", "", 7, "", "", max_running=1, max_waiting=63)
RATE: Final = 16_000
SECOND: Final = 4 * RATE
OTHERS: Final = "others"


class Room(SampleMemory):
    """A room that remembers the most that it held."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self.peak = 0

    def take(self, tenant: str, size_bytes: int) -> None:
        with self.changed:
            super().take(tenant, size_bytes)
            self.peak = max(self.peak, self._held.total())


class Harness:
    """A queue before an inbox that the test reads, or a loop."""

    def __init__(self, model: AudioModel, most_bytes: int) -> None:
        self.model = model
        self.room = Room(most_bytes)
        self.gauges = Gauges()
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.sent: list[Up] = []
        self.intake = AudioIntake(model, lambda: None)
        self.clips = ClipQueue(SPEC, self.inbox, self.room, self.sent.append, self.gauges, self._refusing)
        self.clips.start()

    @contextmanager
    def _refusing(self, rid: int) -> Generator[None]:
        try:
            yield
        except RequestInvalid as error:
            self.sent.append(Rejected(rid, error.failure))

    def ask(self, rid: int, clip: bytes, *, ago_s: float = 0.0, deadline_s: float = 0.0, **settings: Any) -> None:
        request = Generate(
            rid, TranscribePrompt(clip), Sampling(temperature=0.0), deadline_ms=int(deadline_s * 1e3), **settings
        )
        self.clips.put(self.intake.job(request, time.monotonic() - ago_s))

    def next_job(self) -> AudioJob:
        job = self.inbox.get(timeout=patient(10))
        assert isinstance(job, AudioJob)
        return job

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + patient(10)
        while not is_so():
            assert time.monotonic() < deadline, self.sent
            threading.Event().wait(0.002)

    def until_short(self, *rids: int) -> None:
        """Wait until these have been opened, so that their lengths are known, and wait for room."""

        def is_short(rid: int) -> bool:
            clip = self.clips._waiting.get(rid)
            return clip is not None and clip.needed > 0

        self.until(lambda: all(map(is_short, rids)))

    def end(self, rid: int) -> Delta | Rejected:
        """The terminal event of a request, the only one."""
        ends: list[Delta | Rejected] = []

        def has_ended() -> bool:
            deltas = [delta for message in self.sent if isinstance(message, Step) for delta in message.deltas]
            rejected = [message for message in self.sent if isinstance(message, Rejected)]
            ends[:] = [message for message in rejected if message.rid == rid]
            ends.extend(delta for delta in deltas if delta.rid == rid and delta.finish is not None)
            return bool(ends)

        self.until(has_ended)
        assert len(ends) == 1
        return ends[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AudioModel:
    folder = build_moonshine(tmp_path_factory.mktemp("moonshine"))
    return load_audio_model(WorkerSpec("m", str(folder), 1, "", ""), lambda *_: None)


def refusal(end: Delta | Rejected) -> Code:
    assert isinstance(end, Rejected), end
    return end.failure.code


def recorded_live(seconds: float) -> bytes:
    """A file that does not say how long it is, as a browser records it."""

    class Pipe:
        def __init__(self) -> None:
            self.file = BytesIO()

        def write(self, data: bytes) -> int:
            return self.file.write(data)

    pipe = Pipe()
    with av.open(pipe, "w", format="matroska") as container:
        stream: Any = container.add_stream("flac", rate=RATE, layout="mono")
        samples = (8000 * np.sin(np.arange(int(seconds * RATE)) / 20)).astype(np.int16)
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = RATE
        frame.pts = 0
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return pipe.file.getvalue()


def test_a_clip_without_room_waits_and_others_go_by(model: AudioModel) -> None:
    harness = Harness(model, 2 * SECOND)
    harness.room.take(OTHERS, SECOND + SECOND // 2)
    harness.ask(1, tone(1.0))
    harness.ask(2, tone(0.25))
    assert harness.next_job().rid == 2
    harness.until(lambda: harness.gauges.snapshot().waiting == 1)
    harness.room.give_back(OTHERS, SECOND + SECOND // 2)
    job = harness.next_job()
    assert (job.rid, job.sample_bytes) == (1, SECOND)
    assert harness.gauges.snapshot().waiting == 0
    assert harness.room.peak <= 2 * SECOND


def test_a_clip_that_is_larger_than_the_room_gets_in_alone(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.room.take(OTHERS, 4)
    harness.ask(1, tone(3.0))
    harness.until_short(1)
    harness.room.give_back(OTHERS, 4)
    assert harness.next_job().sample_bytes == 3 * SECOND


def test_a_clip_that_the_models_memory_can_never_hold_is_refused(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.room.resize(SECOND, 2 * SECOND)
    for rid, clip in enumerate((tone(2.5), recorded_live(30.0))):
        harness.ask(rid, clip)
        assert refusal(harness.end(rid)) is Code.INVALID_AUDIO
    harness.until(lambda: harness.room.total == 0)
    harness.ask(5, tone(2.0))
    assert harness.next_job().rid == 5


def test_a_smaller_share_refuses_what_can_not_fit_any_more(model: AudioModel) -> None:
    harness = Harness(model, 3 * SECOND)
    harness.room.take(OTHERS, 2 * SECOND)
    harness.ask(1, tone(2.5))
    harness.ask(2, tone(1.5))
    harness.until_short(1, 2)
    harness.room.resize(2 * SECOND, 2 * SECOND)
    assert refusal(harness.end(1)) is Code.INVALID_AUDIO
    harness.room.give_back(OTHERS, 2 * SECOND)
    assert harness.next_job().rid == 2


def test_a_larger_share_lets_in_what_waits(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.room.take(OTHERS, SECOND)
    harness.ask(1, tone(1.0))
    harness.until(lambda: harness.gauges.undecoded == 1)
    harness.room.resize(2 * SECOND, 2 * SECOND)
    assert harness.next_job().rid == 1


def test_clips_have_what_a_share_leaves() -> None:
    mib = 1 << 20
    assert bytes_for_clips(1000 * mib, weights=400 * mib, host=100 * mib, buffers=50 * mib) == (450 - 64) * mib
    assert bytes_for_clips(3000 * mib, weights=1600 * mib, host=100 * mib, buffers=50 * mib) == (1250 - 200) * mib
    assert bytes_for_clips(100 * mib, weights=90 * mib, host=50 * mib, buffers=16 * mib) == 16 * mib


def test_a_file_of_unknown_length_never_has_more_than_its_room(model: AudioModel) -> None:
    harness = Harness(model, 100 * SECOND)
    harness.room.take(OTHERS, 50 * SECOND)
    harness.ask(1, recorded_live(60.0))
    harness.until_short(1)
    with pytest.raises(Empty):
        harness.inbox.get_nowait()
    assert harness.room.total == 50 * SECOND
    harness.room.give_back(OTHERS, 50 * SECOND)
    job = harness.next_job()
    assert job.heard_s == pytest.approx(60.0, abs=0.2)
    assert harness.room.total == job.sample_bytes
    assert harness.room.peak <= 100 * SECOND


def test_an_abort_ends_a_clip_that_waits_at_once(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.room.take(OTHERS, SECOND)
    harness.ask(1, tone(1.0))
    harness.ask(2, tone(1.0))
    harness.clips.put(Abort((1, 99)))
    end = harness.end(1)
    assert isinstance(end, Delta)
    assert end.finish is Finish.ABORT
    assert harness.inbox.get(timeout=patient(10)) == Abort((99,))
    harness.room.give_back(OTHERS, SECOND)
    assert harness.next_job().rid == 2


def test_a_deadline_counts_from_the_arrival_and_is_a_refusal_to_try_again(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.room.take(OTHERS, SECOND + 1)
    harness.ask(1, tone(1.0), ago_s=1000.0, deadline_s=1000.1)
    harness.ask(2, tone(1.0), ago_s=1000.0, deadline_s=5000.0)
    harness.ask(3, tone(1.0), ago_s=601.0)
    assert refusal(harness.end(1)) is Code.BUSY
    assert refusal(harness.end(3)) is Code.BUSY
    assert list(harness.clips._waiting) == [2]


def test_a_drain_refuses_what_waits(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.room.take(OTHERS, SECOND + 1)
    harness.ask(1, tone(1.0))
    harness.clips.put(Drain(5.0))
    assert refusal(harness.end(1)) is Code.DRAINING
    assert isinstance(harness.inbox.get(timeout=patient(10)), Drain)


def test_a_queue_has_a_bound(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.room.take(OTHERS, SECOND + 1)
    for rid in range(66):
        harness.ask(rid, tone(0.2))
    ends = [harness.end(rid) for rid in (64, 65)]
    assert [refusal(end) for end in ends] == [Code.BUSY] * 2
    assert len(harness.clips._waiting) == 64


def test_a_clip_is_not_passed_by_forever(model: AudioModel) -> None:
    harness = Harness(model, 2 * SECOND)
    harness.room.take(OTHERS, SECOND)
    harness.ask(100, tone(1.5))
    harness.until_short(100)
    passed: list[int] = []
    for rid in range(40):
        harness.ask(rid, tone(0.1))
        try:
            job = harness.inbox.get(timeout=patient(10) if rid < 32 else 0.05)
        except Empty:
            break
        passed.append(job.rid)
        harness.room.give_back(job.tenant, job.sample_bytes)
    assert passed == list(range(32))
    harness.room.give_back(OTHERS, SECOND)
    assert {harness.next_job().rid, harness.next_job().rid} == {100, 32}


def test_a_tenant_without_clips_goes_before_one_that_has_some(model: AudioModel) -> None:
    harness = Harness(model, 3 * SECOND)
    harness.room.take(OTHERS, 2 * SECOND)
    harness.room.take("busy", SECOND)
    for rid, tenant, priority in ((1, "busy", 0), (2, "new", 0), (3, "busy", -1)):
        harness.ask(rid, tone(1.0), tenant=tenant, priority=priority)
    harness.until_short(1, 2, 3)
    rids: list[int] = []
    for _ in range(3):
        harness.room.give_back(OTHERS if len(rids) < 2 else "busy", SECOND)
        rids.append(harness.next_job().rid)
    assert rids == [3, 2, 1]


def test_a_broken_clip_is_refused_and_leaves_nothing(model: AudioModel) -> None:
    harness = Harness(model, SECOND)
    harness.ask(1, b"not audio")
    harness.ask(2, tone(0.05))
    assert [refusal(harness.end(rid)) for rid in (1, 2)] == [Code.INVALID_AUDIO] * 2
    harness.until(lambda: not harness.room.total)


def test_all_of_many_clips_are_heard_in_a_small_room(model: AudioModel) -> None:
    harness = Harness(model, 2 * SECOND)
    loop = AudioLoop(model, SPEC, harness.sent.append, harness.gauges, harness.room)
    loop.inbox = harness.inbox
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    for rid in range(1, 13):
        harness.ask(rid, tone(0.3 + rid % 4 * 0.3), tenant=str(rid % 3))
    ends = [harness.end(rid) for rid in range(1, 13)]
    harness.clips.put(Shutdown())
    threads.join(thread)
    assert {end.finish for end in ends if isinstance(end, Delta)} == {Finish.STOP}
    assert len([end for end in ends if isinstance(end, Delta)]) == 12
    assert harness.room.total == 0
    assert harness.room.peak <= 2 * SECOND
