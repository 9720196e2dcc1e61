"""Watch of a group: threads that no engine can block tell the ranks of each other's life.

A rank whose partner is gone waits in a collective forever: it is ended from here, by the end of its process.
"""

import faulthandler
import logging
import socket as tcp
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import group
from protocol.codec import MalformedFrame
from protocol.failures import FINAL_EXITS, Code, ExitStatus, Failure
from protocol.group import GroupStopped, RankFailed, RankHeartbeat
from protocol.spec import RankSpec
from worker.group.rank_sockets import LINGER_MS, RankSockets, Socket
from worker.group.run_clock import RunClock

log = logging.getLogger("mlxd.worker")

BEAT_S: Final = 0.25
_BEAT_MS: Final = int(BEAT_S * 1e3)
# A turn of a watch takes this at most, unless its thread does not run.
TURN_S: Final = 1.0
# A tick may take so many times as long as the ones before it.
_SLOWER: Final = 4.0
# How long an attempt to connect may take that shows whether rank 0 still listens.
_PROBE_S: Final = 0.25

Lost = Callable[[Failure, int], None]
"""Ends the process: the reason, and the exit status."""


class RankProgress:
    """Plans of this rank: the newest that it has begun and done, and since when it runs. Written by the engine."""

    def __init__(self, first_s: float) -> None:
        self.begun = 0
        self.done = 0
        self.began_at = 0.0
        self._cpu_at = 0.0
        # The longest of the newest ones, which decays.
        self.longest_s = first_s

    def begin(self, seq: int) -> None:
        # The watch reads the other way round, and so never counts CPU time of before with a new plan.
        self._cpu_at = time.process_time()
        self.begun, self.began_at = seq, time.monotonic()

    def finish(self) -> None:
        """This rank has done its part of the plan."""
        self.done = self.begun

    def end(self) -> None:
        """The plan was done, on all ranks as far as this one has to know."""
        seconds = time.monotonic() - self.began_at
        self.longest_s = max(seconds, 0.95 * self.longest_s)
        self.done, self.began_at = self.begun, 0.0

    @property
    def cpu_s(self) -> float:
        """CPU time of this process since the plan that runs began; 0 where none runs.

        Ranks that wait for each other in a collective use it up, and ranks that a busy machine does not run do not.
        """
        return time.process_time() - self._cpu_at if self.began_at else 0.0


class _Watch:
    """One rank's thread, with a socket of its own."""

    def __init__(self, rank: RankSpec, sockets: RankSockets, progress: RankProgress, lost: Lost) -> None:
        self.rank = rank
        self.progress = progress
        self._sockets = sockets
        self._lost = lost
        self._is_closing = threading.Event()
        self._is_guarded = False
        # The newest plan at the newest look of the guard.
        self._begun = 0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """Whether the thread has ended, as it does but where it is stuck."""
        self._is_closing.set()
        self._thread.join(timeout=5.0)
        faulthandler.cancel_dump_traceback_later()
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # the root of the thread
            log.exception("the watch of the group failed")
            self._lost(Failure(Code.INTERNAL, "the watch of the group failed", repr(error)), ExitStatus.INTERNAL)

    def _watch(self) -> None:
        raise NotImplementedError

    @property
    def limit_s(self) -> float:
        """The most CPU time that a rank may need for a plan."""
        return max(self.rank.step_s, _SLOWER * self.progress.longest_s)

    def begin(self, seq: int) -> None:
        """The engine begins a plan."""
        self.progress.begin(seq)
        if not self._is_guarded:
            # This thread would come too late, where the plan never gives Python's lock back.
            self._arm()

    def _arm(self) -> None:
        """End the process where this thread does not come back in time: native code that waits for a partner may hold
        Python's lock (NCCL's does). The stacks go to stderr, and the status is 1."""
        self._is_guarded = True
        faulthandler.dump_traceback_later(max(self.rank.beat_s, self.limit_s), exit=True)

    def _guard(self) -> None:
        """Arm in each turn while plans run. Between them a process may be stopped for as long as its machine likes."""
        if self.progress.began_at or self._begun != self.progress.begun:
            self._begun = self.progress.begun
            self._arm()
        elif self._is_guarded:
            self._is_guarded = False
            faulthandler.cancel_dump_traceback_later()
            if self.progress.began_at:  # a plan has begun in between, and was taken for guarded
                self._arm()

    def _beat(self) -> RankHeartbeat:
        return RankHeartbeat(self.rank.rank, self.progress.begun, self.progress.done, self.progress.cpu_s)

    def lose(self, why: str, status: int = ExitStatus.PARTNER_LOST, code: Code = Code.WORKER_DIED) -> None:
        if not self._is_closing.is_set():
            self._lost(Failure(code, why), status)


class LeadWatch(_Watch):
    """Rank 0's: hears all followers. `names` are those of the nodes, by rank."""

    def __init__(
        self, rank: RankSpec, names: tuple[str, ...], sockets: RankSockets, progress: RankProgress, lost: Lost
    ) -> None:
        super().__init__(rank, sockets, progress, lost)
        self._names = names
        self._clock = RunClock(TURN_S)
        self._heard: dict[int, float] = {}
        self._beats: dict[int, RankHeartbeat] = {}
        # The plan that runs as the newest look has seen it, and when it was seen first.
        self._plan = (0, 0.0)
        self._is_complete = threading.Event()
        self._is_leaving = False
        self._socket = sockets.bind(rank.watch)

    def absent(self, timeout_s: float) -> list[int]:
        """Followers that were not heard of within this time."""
        if self._is_complete.wait(max(0.0, timeout_s)):
            return []
        return [rank for rank in range(1, len(self._names)) if rank not in self._heard]

    def leave(self) -> None:
        """Tell the followers that the group was stopped: from here on no end of a rank is a loss."""
        self._is_leaving = True

    def lose(self, why: str, status: int = ExitStatus.PARTNER_LOST, code: Code = Code.WORKER_DIED) -> None:
        if not self._is_leaving:
            super().lose(why, status, code)

    def _watch(self) -> None:
        socket, said = self._socket, -BEAT_S
        while not self._is_closing.is_set():
            if socket.poll(_BEAT_MS):
                self._hear(socket)
            now = self._clock.look()
            if now - said >= BEAT_S:
                said = now
                self._guard()
                self._say(socket)
                self._check(now)
        socket.close()

    def _hear(self, socket: Socket) -> None:
        frames = socket.recv_multipart()
        try:
            message = group.decode_watch(frames[-1])
        except MalformedFrame as error:
            log.warning("dropped a malformed frame of the group: %s", error)
            return
        rank = int.from_bytes(frames[0], "big")
        if not 0 < rank < len(self._names) or (
            isinstance(message, RankHeartbeat | RankFailed) and message.rank != rank
        ):
            log.warning("dropped a frame of the group under the rank %d, which is none of its followers", rank)
            return
        match message:
            case GroupStopped():
                pass  # only rank 0 says so
            case RankHeartbeat():
                self._heard[rank], self._beats[rank] = self._clock.now, message
                if len(self._heard) == len(self._names) - 1:
                    self._is_complete.set()
            case RankFailed(status=status, failure=failure):
                why = f"rank {rank} ({self._name(rank)}): {failure.message}"
                if status in FINAL_EXITS:
                    self.lose(why, status, failure.code)
                else:
                    self.lose(f"{why} {failure.detail}".strip())

    def _say(self, socket: Socket) -> None:
        frame = group.encode(GroupStopped() if self._is_leaving else self._beat())
        for rank in list(self._heard):
            try:
                socket.send_multipart((group.identity(rank), frame), zmq.NOBLOCK)
            except zmq.ZMQError:
                while socket.poll(0):
                    self._hear(socket)  # it may have said why
                self.lose(f"rank {rank} ({self._name(rank)}) is gone")

    def _check(self, now: float) -> None:
        for rank, heard in self._heard.items():
            if now - heard > self.rank.beat_s:
                self.lose(f"rank {rank} ({self._name(rank)}) has been silent for {now - heard:.0f} s")
        self._check_plan(now)

    def _check_plan(self, now: float) -> None:
        """All ranks are heard; those behind may still be slow, as on a busy machine, or wait for each other forever."""
        progress = self.progress
        if not progress.began_at or self._plan[0] != progress.begun:
            self._plan = (progress.begun, now)
            return
        age_s = now - self._plan[1]
        behind = {beat.rank: beat for beat in (self._beat(), *self._beats.values()) if beat.done < progress.begun}
        # A beat of the plan before counts CPU time of that one.
        used_s = min((beat.cpu_s if beat.begun == progress.begun else 0.0 for beat in behind.values()), default=0.0)
        if min(age_s, used_s) > self.limit_s or age_s > max(self.rank.stuck_s, self.limit_s):
            others = (f"rank {rank} ({self._name(rank)})" for rank in sorted(behind) if rank != self.rank.rank)
            who = ", ".join(others) or "no other rank"
            self.lose(f"plan {progress.begun} has taken {age_s:.0f} s; {who} has not done it either")

    def _name(self, rank: int) -> str:
        return self._names[rank] if rank < len(self._names) else "unknown"


class FollowerWatch(_Watch):
    """A follower's: hears rank 0."""

    def __init__(self, rank: RankSpec, sockets: RankSockets, progress: RankProgress, lost: Lost) -> None:
        super().__init__(rank, sockets, progress, lost)
        self._words: SimpleQueue[RankFailed] = SimpleQueue()
        # Rank 0 has stopped the group: from here on its end is no loss.
        self._is_left = False
        # The connection has ended, and there is no other one yet.
        self._is_cut = False

    def fail(self, failure: Failure, status: int) -> None:
        """Say why this rank ends, and close."""
        self._words.put(RankFailed(self.rank.rank, status, failure))
        self.close()

    def _watch(self) -> None:
        socket = self._sockets.connect(self.rank.watch)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        clock = RunClock(TURN_S)
        heard, patience_s = clock.now, self.rank.join_s
        has_met = False
        while not self._is_closing.is_set():
            self._guard()
            with suppress(zmq.Again):  # until rank 0 is there
                socket.send(group.encode(self._beat()), zmq.NOBLOCK)
            if socket.poll(_BEAT_MS):
                self._hear(socket)
                heard, patience_s = clock.now, self.rank.beat_s
                self._is_closing.wait(BEAT_S)
            while monitor.poll(0):
                is_up = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                has_met |= is_up
                # Before rank 0 was met it may be a process of before that has its port.
                self._is_cut = has_met and not is_up
            if self._is_cut and _refuses(self.rank.watch):
                self._hear(socket)  # it may have said so
                if not self._is_left:
                    self.lose("rank 0 has ended")
            silence_s = clock.look() - heard
            if silence_s > patience_s:
                status = ExitStatus.OK if self._is_left else ExitStatus.PARTNER_LOST
                self.lose(f"rank 0 has been silent for {silence_s:.0f} s", status)
        socket.disable_monitor()
        monitor.close(0)
        with suppress(Empty, zmq.Again):
            while True:
                socket.send(group.encode(self._words.get_nowait()), zmq.NOBLOCK)
        socket.close(LINGER_MS)

    def _hear(self, socket: Socket) -> None:
        """Take in all that is there."""
        while socket.poll(0):
            frame = socket.recv()
            with suppress(MalformedFrame):
                self._is_left |= isinstance(group.decode_watch(frame), GroupStopped)


def _refuses(address: str) -> bool:
    """Whether nothing listens at an address whose machine answers."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        with tcp.create_connection((host, int(port)), _PROBE_S):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:  # its machine or the network is gone: silence tells
        return False
