"""Liveness of a group. The end of one rank is the end of all, and the gateway starts the group again.

| a rank | is noticed by | which ends | within |
|---|---|---|---|
| has exited | the supervisor, by its process; that of a remote rank is the ssh client | the others | a few seconds |
| has not begun | all ranks that have | themselves | `join_s` |
| is silent | rank 0; rank 0's silence: the followers | themselves | `beat_s` |
| does not finish a plan | rank 0 | itself | `step_s` of CPU time, or `stuck_s` |
| does not run its watch | its own timer | itself | the longer of `beat_s` and its limit for a plan |

The watch is a thread of each rank that the engine cannot block, because a rank whose partner is gone waits in a
collective forever. It exchanges `RankHeartbeat` between rank 0 and each follower. Time in which its own process did not
run does not count. A remote rank also ends with its standard input, which its ssh client holds. The times are fields of
`RankSpec`, and those of the supervisor are in `ranks.py`. To the supervisor rank 0 is also a worker like any other,
with longer limits.

Sockets between the ranks of a group, with CURVE: only ranks of the same start are accepted.
"""

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protocol import group, sockets
from protocol.codec import MalformedFrame
from protocol.failures import Code, ExitStatus, Failure
from protocol.from_worker import Goodbye
from protocol.group import RankHeartbeat
from protocol.run_clock import RunClock
from protocol.sockets import AllowedKeys, KeyPair
from protocol.spec import RankSpec
from worker.errors import LoadFailed, PartnerLost

log = logging.getLogger("mlxd.worker")

Socket = zmq.Socket[bytes]
# The last message of an ending rank is dropped if it is not sent within this time.
LINGER_MS: Final = 1000


class RankSockets:
    """Sockets of one rank. Each socket belongs to the thread that requested it."""

    def __init__(self, rank: RankSpec) -> None:
        self._rank = rank
        self._keys = KeyPair(rank.public, rank.secret)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        if rank.rank == 0:
            # The authenticator must run before a socket is bound.
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", AllowedKeys(lambda: rank.members, _refused))

    def bind(self, address: str) -> Socket:
        """Bind rank 0's socket. Raises `PartnerLost` if the port is in use; the next start chooses another port."""
        try:
            return sockets.bind_secure_router(self._context, address, self._keys)
        except zmq.ZMQError as error:
            raise PartnerLost(f"rank 0 cannot listen on {address}: {error}") from error

    def connect(self, address: str) -> Socket:
        """Connect a follower's socket."""
        identity = group.identity(self._rank.rank)
        return sockets.connect_secure_dealer(self._context, address, identity, self._rank.server, self._keys)

    def close(self) -> None:
        """Close the context. All sockets must be closed before."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _refused(key: str) -> None:
    log.warning("refused a connection to the group by a key that is none of its ranks': %s", key)


BEAT_S: Final = 0.25
_BEAT_MS: Final = int(BEAT_S * 1e3)
# Maximum duration of one turn of a watch thread, provided that the thread is scheduled.
TURN_S: Final = 1.0
# Maximum duration of a plan, as a multiple of the longest recent plan's duration.
_MAX_SLOWDOWN: Final = 4.0

Lost = Callable[[Failure, int], None]
"""Ends the process: the reason, and the exit status."""


class RankProgress:
    """Progress of this rank, written by the engine: the newest plans that the rank has begun and done, and the time at
    which it began the newest one."""

    def __init__(self, first_s: float) -> None:
        self.begun = 0
        self.done = 0
        self.began_at = 0.0
        self._cpu_at = 0.0
        # Longest duration of a recent plan in seconds; it decays with each further plan.
        self.longest_s = first_s

    def begin(self, seq: int) -> None:
        # The watch reads these fields in reverse order, so that it never counts earlier CPU time for a new plan.
        self._cpu_at = time.process_time()
        self.begun, self.began_at = seq, time.monotonic()

    def finish(self) -> None:
        """Mark this rank's part of the plan as done."""
        self.done = self.begun

    def end(self) -> None:
        """Mark the plan as done on all ranks that this rank waits for."""
        seconds = time.monotonic() - self.began_at
        self.longest_s = max(seconds, 0.95 * self.longest_s)
        self.done, self.began_at = self.begun, 0.0

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU time that this process has used since the current plan began; 0 if no plan runs.

        CPU time grows on ranks that wait in a collective, but not on ranks that a busy machine does not schedule.
        """
        return time.process_time() - self._cpu_at if self.began_at else 0.0


class _Watch:
    """Watch thread of one rank, with its own socket."""

    def __init__(self, rank: RankSpec, sockets: RankSockets, progress: RankProgress, lost: Lost) -> None:
        self.rank = rank
        self.progress = progress
        self._sockets = sockets
        self._lost = lost
        self._is_closing = threading.Event()
        # Whether this rank is leaving the group; if so, the end of another rank is no failure.
        self._is_leaving = False
        self._is_guarded = False
        # Newest plan at the last call of `_guard`.
        self._begun = 0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """Close the watch. Returns whether its thread has ended; only a stuck thread has not."""
        self._is_closing.set()
        self._thread.join(timeout=5.0)
        faulthandler.cancel_dump_traceback_later()
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # without this watch, a lost rank would stay undetected, so the process ends
            log.exception("the watch of the group failed")
            self._lost(Failure(Code.INTERNAL, "the watch of the group failed", repr(error)), ExitStatus.INTERNAL)

    def _watch(self) -> None:
        raise NotImplementedError

    @property
    def limit_s(self) -> float:
        """Maximum CPU time of a rank for one plan."""
        return max(self.rank.step_s, _MAX_SLOWDOWN * self.progress.longest_s)

    def begin(self, seq: int) -> None:
        """Record that the engine begins a plan."""
        self.progress.begin(seq)
        if not self._is_guarded:
            # The timer is armed here, because the watch thread cannot run if the plan never releases the GIL.
            self._arm()

    def _arm(self) -> None:
        """Arm the timer. It ends the process with status 1 and writes the stacks to stderr, unless the watch thread
        arms or cancels it in time.

        The timer fires even if native code that waits for another rank holds the GIL, as NCCL's does. The watch thread
        cannot run then.
        """
        self._is_guarded = True
        faulthandler.dump_traceback_later(max(self.rank.beat_s, self.limit_s), exit=True)

    def _guard(self) -> None:
        """Arm the timer in each turn while plans run. Between plans the process may be suspended for any length of
        time."""
        if self.progress.began_at or self._begun != self.progress.begun:
            self._begun = self.progress.begun
            self._arm()
        elif self._is_guarded:
            self._is_guarded = False
            faulthandler.cancel_dump_traceback_later()
            if self.progress.began_at:  # a plan began in the meantime and relies on the armed timer
                self._arm()

    def _beat(self) -> RankHeartbeat:
        return RankHeartbeat(self.progress.begun, self.progress.done, self.progress.cpu_s)

    def lose(self, why: str, status: int = ExitStatus.PARTNER_LOST, code: Code = Code.WORKER_DIED) -> None:
        """End the process because another rank is lost, unless this rank leaves."""
        if not (self._is_leaving or self._is_closing.is_set()):
            self._lost(Failure(code, why), status)


class LeadWatch(_Watch):
    """Watch of rank 0, which receives from all followers. `names` are the names of the nodes, by rank."""

    def __init__(
        self, rank: RankSpec, names: tuple[str, ...], sockets: RankSockets, progress: RankProgress, lost: Lost
    ) -> None:
        super().__init__(rank, sockets, progress, lost)
        self._names = names
        self._clock = RunClock(TURN_S)
        self._received_at: dict[int, float] = {}
        self._beats: dict[int, RankHeartbeat] = {}
        # Current plan at the newest check, and the time of the first check that saw this plan.
        self._plan = (0, 0.0)
        self._is_complete = threading.Event()
        self._socket = sockets.bind(rank.watch)

    def absent(self, timeout_s: float) -> list[int]:
        """Return the ranks of the followers that have not sent a heartbeat within this time."""
        if self._is_complete.wait(max(0.0, timeout_s)):
            return []
        return [rank for rank in range(1, len(self._names)) if rank not in self._received_at]

    def leave(self) -> None:
        """From now on, the end of a rank is no failure."""
        self._is_leaving = True

    def _watch(self) -> None:
        socket, sent = self._socket, -BEAT_S
        while not self._is_closing.is_set():
            if socket.poll(_BEAT_MS):
                self._receive(socket)
            now = self._clock.look()
            if now - sent >= BEAT_S:
                sent = now
                self._guard()
                self._send(socket)
                self._check(now)
        socket.close()

    def _receive(self, socket: Socket) -> None:
        frames = socket.recv_multipart()
        try:
            message = group.decode_watch(frames[-1])
        except MalformedFrame as error:
            log.warning("dropped a malformed frame of the group: %s", error)
            return
        rank = int.from_bytes(frames[0], "big")
        if not 0 < rank < len(self._names):
            log.warning("dropped a frame of the group under the rank %d, which is none of its followers", rank)
            return
        match message:
            case RankHeartbeat():
                self._received_at[rank], self._beats[rank] = self._clock.now, message
                if len(self._received_at) == len(self._names) - 1:
                    self._is_complete.set()
            case Goodbye(reason=reason, failure=failure):
                failure = failure or Failure(Code.WORKER_DIED, reason)
                why = f"rank {rank} ({self._name(rank)}): {failure.message}"
                if failure.code is Code.WORKER_DIED:
                    self.lose(f"{why} {failure.detail}".strip())
                else:
                    self.lose(why, LoadFailed(failure.code, why).exit_status, failure.code)

    def _send(self, socket: Socket) -> None:
        frame = group.encode(self._beat())
        for rank in list(self._received_at):
            try:
                socket.send_multipart((group.identity(rank), frame), zmq.NOBLOCK)
            except zmq.ZMQError:
                while socket.poll(0):
                    self._receive(socket)  # the rank may have sent the reason of its end
                self.lose(f"rank {rank} ({self._name(rank)}) is gone")

    def _check(self, now: float) -> None:
        for rank, received_at in self._received_at.items():
            if now - received_at > self.rank.beat_s:
                self.lose(f"rank {rank} ({self._name(rank)}) has been silent for {now - received_at:.0f} s")
        self._check_plan(now)

    def _check_plan(self, now: float) -> None:
        """End the process if the current plan takes too long. Ranks that are alive but have not done it may be
        deadlocked, or only slow on a busy machine. So their CPU time counts, and their waiting time has a higher limit.
        """
        progress = self.progress
        if not progress.began_at or self._plan[0] != progress.begun:
            self._plan = (progress.begun, now)
            return
        age_s = now - self._plan[1]
        beats = {**self._beats, self.rank.rank: self._beat()}
        behind = {rank: beat for rank, beat in beats.items() if beat.done < progress.begun}
        # A heartbeat that was sent during the previous plan has the CPU time of that plan.
        used_s = min((beat.cpu_s if beat.begun == progress.begun else 0.0 for beat in behind.values()), default=0.0)
        if min(age_s, used_s) > self.limit_s or age_s > max(self.rank.stuck_s, self.limit_s):
            others = (f"rank {rank} ({self._name(rank)})" for rank in sorted(behind) if rank != self.rank.rank)
            who = ", ".join(others) or "no other rank"
            self.lose(f"plan {progress.begun} has taken {age_s:.0f} s; {who} has not done it either")

    def _name(self, rank: int) -> str:
        return self._names[rank] if rank < len(self._names) else "unknown"


class FollowerWatch(_Watch):
    """Watch of a follower, which receives from rank 0."""

    def __init__(self, rank: RankSpec, sockets: RankSockets, progress: RankProgress, lost: Lost) -> None:
        super().__init__(rank, sockets, progress, lost)
        self._goodbye: Goodbye | None = None

    def fail(self, goodbye: Goodbye) -> None:
        """Send the reason why this rank ends, and close."""
        self._goodbye = goodbye
        self.close()

    def _watch(self) -> None:
        socket = self._sockets.connect(self.rank.watch)
        clock = RunClock(TURN_S)
        received_at, patience_s = clock.now, self.rank.join_s
        while not self._is_closing.is_set():
            self._guard()
            with suppress(zmq.Again):  # rank 0 may not listen yet
                socket.send(group.encode(self._beat()), zmq.NOBLOCK)
            if socket.poll(_BEAT_MS):
                while socket.poll(0):
                    socket.recv()  # rank 0 sends only heartbeats
                received_at, patience_s = clock.now, self.rank.beat_s
                self._is_closing.wait(BEAT_S)
            silence_s = clock.look() - received_at
            if silence_s > patience_s:
                self.lose(f"rank 0 has been silent for {silence_s:.0f} s")
        if self._goodbye is not None:
            with suppress(zmq.Again):
                socket.send(group.encode(self._goodbye), zmq.NOBLOCK)
        socket.close(LINGER_MS)
