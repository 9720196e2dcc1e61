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
from protocol.failures import FINAL_EXITS, Code, Exit, Failure
from protocol.group import Beat, Failed, Left
from protocol.spec import RankSpec
from worker.group.rank_sockets import LINGER_MS, RankSockets, Socket

log = logging.getLogger("mlxd.worker")

BEAT_S: Final = 0.25
_BEAT_MS: Final = int(BEAT_S * 1e3)
# A watch that did not run for so long, as when the machine slept, blames nobody for the silence.
BLACKOUT_S: Final = 2.0
# A tick may take so many times as long as the ones before it.
SLOWER: Final = 4.0
# How long an attempt to connect may take that shows whether rank 0 still listens.
_PROBE_S: Final = 0.25

Lost = Callable[[Failure, int], None]
"""Ends the process: the reason, and the exit status."""


class Progress:
    """Plans of this rank: the newest that it has begun and done, and since when it runs. Written by the engine."""

    def __init__(self, first_s: float) -> None:
        self.begun = 0
        self.done = 0
        self.began_at = 0.0
        # The longest of the newest ones, which decays.
        self.longest_s = first_s

    def begin(self, seq: int) -> bool:
        """Whether it is the first."""
        is_first = not self.begun
        self.begun, self.began_at = seq, time.monotonic()
        return is_first

    def end(self) -> None:
        seconds = time.monotonic() - self.began_at
        self.longest_s = max(seconds, 0.95 * self.longest_s)
        self.done, self.began_at = self.begun, 0.0


class _Watch:
    """One rank's thread, with a socket of its own."""

    def __init__(self, rank: RankSpec, sockets: RankSockets, progress: Progress, lost: Lost) -> None:
        self.rank = rank
        self.progress = progress
        self._sockets = sockets
        self._lost = lost
        self._is_closing = threading.Event()
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
            self._lost(Failure(Code.INTERNAL, "the watch of the group failed", repr(error)), Exit.INTERNAL)

    def _watch(self) -> None:
        raise NotImplementedError

    @property
    def limit_s(self) -> float:
        """The longest that a plan may take."""
        return max(self.rank.step_s, SLOWER * self.progress.longest_s)

    def guard(self) -> None:
        """End the process where this thread does not come back in time: native code that waits for a partner may hold
        Python's lock (NCCL's does). The stacks go to stderr, and the status is 1."""
        if self.progress.begun:
            faulthandler.dump_traceback_later(max(self.rank.beat_s, self.limit_s), exit=True)

    def _beat(self) -> bytes:
        return group.encode(Beat(self.rank.rank, self.progress.begun, self.progress.done))

    def lose(self, why: str, status: int = Exit.PARTNER_LOST, code: Code = Code.WORKER_DIED) -> None:
        if not self._is_closing.is_set():
            self._lost(Failure(code, why), status)


class LeadWatch(_Watch):
    """Rank 0's: hears all followers. `names` are those of the nodes, by rank."""

    def __init__(
        self, rank: RankSpec, names: tuple[str, ...], sockets: RankSockets, progress: Progress, lost: Lost
    ) -> None:
        super().__init__(rank, sockets, progress, lost)
        self._names = names
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Beat] = {}
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

    def lose(self, why: str, status: int = Exit.PARTNER_LOST, code: Code = Code.WORKER_DIED) -> None:
        if not self._is_leaving:
            super().lose(why, status, code)

    def _watch(self) -> None:
        socket, looked, said = self._socket, time.monotonic(), 0.0
        while not self._is_closing.is_set():
            if socket.poll(_BEAT_MS):
                self._hear(socket)
            now = time.monotonic()
            if now - looked > BLACKOUT_S:
                self._heard = dict.fromkeys(self._heard, now)
            looked = now
            if now - said >= BEAT_S:
                said = now
                self.guard()
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
        if not 0 < rank < len(self._names) or (isinstance(message, Beat | Failed) and message.rank != rank):
            log.warning("dropped a frame of the group under the rank %d, which is none of its followers", rank)
            return
        match message:
            case Left():
                pass  # only rank 0 says so
            case Beat():
                self._heard[rank], self._beats[rank] = time.monotonic(), message
                if len(self._heard) == len(self._names) - 1:
                    self._is_complete.set()
            case Failed(status=status, failure=failure):
                why = f"rank {rank} ({self._name(rank)}): {failure.message}"
                if status in FINAL_EXITS:
                    self.lose(why, status, failure.code)
                else:
                    self.lose(f"{why} {failure.detail}".strip())

    def _say(self, socket: Socket) -> None:
        frame = group.encode(Left()) if self._is_leaving else self._beat()
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
        began_at = self.progress.began_at
        if began_at and now - began_at > self.limit_s:
            behind = [rank for rank, beat in self._beats.items() if beat.done < self.progress.begun]
            who = ", ".join(f"rank {rank} ({self._name(rank)})" for rank in behind) or "no other rank"
            self.lose(f"plan {self.progress.begun} has taken {now - began_at:.0f} s; {who} has not done it either")

    def _name(self, rank: int) -> str:
        return self._names[rank] if rank < len(self._names) else "unknown"


class FollowerWatch(_Watch):
    """A follower's: hears rank 0."""

    def __init__(self, rank: RankSpec, sockets: RankSockets, progress: Progress, lost: Lost) -> None:
        super().__init__(rank, sockets, progress, lost)
        self._words: SimpleQueue[Failed] = SimpleQueue()
        # Rank 0 has stopped the group: from here on its end is no loss.
        self._is_left = False
        # The connection has ended, and there is no other one yet.
        self._is_cut = False

    def fail(self, failure: Failure, status: int) -> None:
        """Say why this rank ends, and close."""
        self._words.put(Failed(self.rank.rank, status, failure))
        self.close()

    def _watch(self) -> None:
        socket = self._sockets.connect(self.rank.watch)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        heard = looked = time.monotonic()
        patience_s = self.rank.join_s
        has_met = False
        while not self._is_closing.is_set():
            self.guard()
            with suppress(zmq.Again):  # until rank 0 is there
                socket.send(self._beat(), zmq.NOBLOCK)
            if socket.poll(_BEAT_MS):
                self._hear(socket)
                heard, patience_s = time.monotonic(), self.rank.beat_s
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
            now = time.monotonic()
            if now - looked > BLACKOUT_S:
                heard = now
            looked = now
            if now - heard > patience_s:
                status = Exit.OK if self._is_left else Exit.PARTNER_LOST
                self.lose(f"rank 0 has been silent for {now - heard:.0f} s", status)
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
                self._is_left |= isinstance(group.decode_watch(frame), Left)


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
