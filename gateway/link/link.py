"""Link to the workers: the table of running sequences. It drops messages of old epochs.

Pending calls to workers, and the futures that wait for their results.
"""

import asyncio
import itertools
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gateway.link.collector import Collector
from gateway.link.sequence import PARKED, LinkEvents, Sequence
from gateway.link.transport import (
    Connection,
    MakeWire,
    Report,
    Runner,
    SendFailed,
    SequenceProgressed,
    Transport,
    WorkerGone,
    ZmqWire,
    frames_of,
)
from protocol.codec import MalformedFrame, Unsendable, decode_up
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    AdaptersSet,
    Delta,
    Drained,
    Explained,
    Finish,
    Goodbye,
    Hello,
    Loading,
    Pong,
    Progress,
    Ready,
    Rejected,
    Step,
    Tokenized,
    Up,
)
from protocol.to_worker import Abort, Detokenize, Down, Drain, Explain, Generate, Ping, Shutdown, Tokenize

log = logging.getLogger(__name__)

CallResult = asyncio.Future[Tokenized | Explained]


class CallRefused(Exception):
    """Raised when a worker rejected a call, or was lost before it sent the result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class PendingCalls:
    """Futures of pending calls by request id, each with the epoch of the call's worker. The link owns them."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, CallResult]] = {}

    @contextmanager
    def open(self, epoch: int, rid: int) -> Generator[CallResult, None, None]:
        """Yield the future for the result of a call. The future raises `CallRefused` if the call fails."""
        result: CallResult = asyncio.get_running_loop().create_future()
        self._pending[rid] = (epoch, result)
        try:
            yield result
        finally:
            del self._pending[rid]

    def __contains__(self, rid: int) -> bool:
        return rid in self._pending

    def epoch_of(self, rid: int) -> int | None:
        return self._pending[rid][0] if rid in self._pending else None

    def has_any(self, epoch: int) -> bool:
        """Whether the worker of `epoch` has a pending call."""
        return any(own == epoch for own, _ in self._pending.values())

    def resolve(self, message: Tokenized | Explained) -> None:
        pending = self._pending.get(message.rid)
        if pending is not None and not pending[1].done():
            pending[1].set_result(message)

    def reject(self, rid: int, failure: Failure) -> None:
        pending = self._pending.get(rid)
        if pending is not None and not pending[1].done():
            pending[1].set_exception(CallRefused(failure))

    def reject_all(self, epoch: int, failure: Failure) -> None:
        """Reject all pending calls to a worker that is gone."""
        for rid, (own, _) in self._pending.items():
            if own == epoch:
                self.reject(rid, failure)


MALFORMED_LOG_INTERVAL_S: Final = 1.0
# The higher bits of a rid are the gateway's boot number, by which rids of an earlier gateway are recognised.
RID_BITS: Final = 32
# The higher bits of a Ping's seq are the worker's epoch, which the Pong repeats: nothing else in it names the worker.
SEQ_BITS: Final = 24
_LOST: Final = Failure(Code.WORKER_DIED, "the model's worker was lost; try again")
# If a worker has not ended a sequence this long after its deadline, the gateway does.
LATE_GRACE_S: Final = 1.0
LATE: Final = Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed")
UNSENDABLE: Final = Failure(Code.INVALID_REQUEST, "the request cannot be sent to the model's worker")


class WorkerLink:
    """Sends messages to workers, and passes the workers' messages to the collectors of the sequences.

    The transport owns the sockets; everything here runs on its loop. An epoch is never reused: messages of an epoch
    that is not attached are dropped and counted. Every sequence belongs to an attached epoch, or is parked until
    `resume` or its end.
    """

    def __init__(
        self, run_dir: Path, events: LinkEvents, *, boot: int | None = None, make_wire: MakeWire = ZmqWire
    ) -> None:
        self.boot = secrets.randbits(31) | 1 if boot is None else boot
        self._transport = Transport(run_dir, self._handle, self.wake_readers, make_wire)
        self.down, self.up = self._transport.down, self._transport.up
        self._events = events
        self._connections: dict[int, Connection] = {}
        self._sequences: dict[int, Sequence] = {}
        self._calls = PendingCalls()
        # Threads that lower requests use this counter too; `next` of a count is atomic in CPython.
        self._rids = itertools.count((self.boot << RID_BITS) + 1)
        self._seq = 0
        self._is_closed = False
        self._next_malformed_log = 0.0
        # Ordered set of the collectors to which deltas were appended, whose readers must be woken. The values are
        # unused.
        self._appended: dict[Collector, None] = {}

    # -- start and end -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind both sockets. The run directory's lock must be held: stale socket files are replaced."""
        self._transport.open()

    async def run(self) -> None:
        """Read messages until cancelled. Raises the exception of a failed read."""
        await self._transport.run()

    def close(self) -> None:
        """Close the sockets immediately. Unsent messages are dropped."""
        self._is_closed = True
        self._transport.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def next_rid(self) -> int:
        return next(self._rids)

    @property
    def in_flight(self) -> int:
        return len(self._sequences)

    @property
    def unacked_aborts(self) -> int:
        return sum(len(connection.unacked_aborts) for connection in self._connections.values())

    def is_busy(self, epoch: int) -> bool:
        """Whether a worker has sequences or calls of this gateway."""
        is_running = any(sequence.epoch == epoch for sequence in self._sequences.values())
        return is_running or self._calls.has_any(epoch)

    def submit(self, worker: Runner, requests: list[Generate]) -> Collector:
        """Start the sequences of one request on `worker`.

        Raises `WorkerGone` or `Unsendable`. In that case no sequence has started.
        """
        connection = self._connections.get(worker.epoch)
        if self._is_closed or not worker.is_ready or connection is None:
            raise WorkerGone(f"{worker.name} is not ready")
        loop = asyncio.get_running_loop()
        now = loop.time()
        collector = Collector([request.rid for request in requests])
        collector.epoch = worker.epoch
        frames = frames_of(requests)
        try:
            for request, frame in zip(requests, frames, strict=True):
                if (refusal := worker.refusal(request)) is not None:
                    collector.send_delta(Delta(request.rid, finish=Finish.ERROR, failure=refusal))
                    continue
                deadline = now + request.deadline_ms / 1000 if request.deadline_ms else None
                self._sequences[request.rid] = Sequence(request, worker.epoch, collector, deadline)
                self._transport.send_encoded(connection, frame)
        except WorkerGone:
            for request in requests:
                self._sequences.pop(request.rid, None)
            self._note_unreachable(connection)
            raise
        for request in requests:
            sequence = self._sequences.get(request.rid)
            if sequence is not None and sequence.deadline is not None:
                sequence.timer = loop.call_at(
                    sequence.deadline + LATE_GRACE_S, self.stop, [sequence.rid], "deadline", LATE
                )
        return collector

    def resume(self, epoch: int, sequence: Sequence) -> None:
        """Resume a parked sequence on the worker of `epoch`. Raises `WorkerGone`; the sequence then stays parked.

        If the sequence's deadline has passed, or its generated tokens made it too large to send, it is ended instead.
        """
        now = asyncio.get_running_loop().time()
        if sequence.deadline is not None and now >= sequence.deadline:
            self.fail([sequence], LATE)
            return
        connection = self._attached(epoch)
        try:
            self._transport.send(connection, sequence.continuation(now))
        except WorkerGone:
            self._note_unreachable(connection)
            raise
        except Unsendable as error:
            log.error("worker %s: sequence %d cannot be resumed: %s", connection.name, sequence.rid, error)
            self.fail([sequence], UNSENDABLE)
            return
        sequence.epoch = sequence.collector.epoch = epoch
        sequence.resumed_tokens = len(sequence.token_ids)
        sequence.resumes += 1
        sequence.collector.resumes += 1

    async def call(self, epoch: int, request: Tokenize | Detokenize | Explain) -> Tokenized | Explained:
        """Call a worker. Raises `CallRefused`, for example if the worker is lost meanwhile, `WorkerGone` and
        `Unsendable`.
        """
        connection = self._attached(epoch)
        with self._calls.open(epoch, request.rid) as result:
            self.send(connection, request)
            try:
                return await result
            except asyncio.CancelledError:
                self._transport.try_send(connection, Abort((request.rid,)))
                raise

    def abort(self, rids: Iterable[int], reason: str) -> None:
        """Abort sequences whose reader is gone. Unknown and ended rids are ignored."""
        by_epoch: defaultdict[int, list[int]] = defaultdict(list)
        for rid in rids:
            sequence = self._sequences.get(rid)
            if sequence is None:
                continue
            self._end(sequence)
            sequence.collector.stop_timer()
            by_epoch[sequence.epoch].append(rid)
        for epoch, own in by_epoch.items():
            if (connection := self._connections.get(epoch)) is not None:
                connection.unacked_aborts.update(own)
                self._transport.try_send(connection, Abort(tuple(own), reason))

    def stop(self, rids: Iterable[int], reason: str, failure: Failure | None = None) -> None:
        """Abort sequences that still have a reader. The reader gets terminal deltas, with `failure` if it is given."""
        running = [sequence for rid in rids if (sequence := self._sequences.get(rid)) is not None]
        self.abort([sequence.rid for sequence in running], reason)
        finish = Finish.ABORT if failure is None else Finish.ERROR
        for sequence in running:
            sequence.collector.send_delta(Delta(sequence.rid, finish=finish, failure=failure))

    # -- workers -----------------------------------------------------------------------------------------------------

    def attach(
        self, name: str, epoch: int, post: Callable[[Report], None], park: Callable[[Sequence], None]
    ) -> Connection:
        """Accept the messages of a worker, whose start has the number `epoch`."""
        connection = self._connections[epoch] = Connection(name, epoch, post, park)
        return connection

    def detach(self, epoch: int) -> None:
        """Drop further messages of an epoch, and park its unfinished sequences."""
        connection = self._connections.pop(epoch, None)
        if connection is None:
            return
        self._calls.reject_all(epoch, _LOST)
        for sequence in [sequence for sequence in self._sequences.values() if sequence.epoch == epoch]:
            self._park(connection, sequence)

    def _park(self, connection: Connection, sequence: Sequence) -> None:
        sequence.epoch = PARKED
        connection.park(sequence)

    def fail(self, sequences: Iterable[Sequence], failure: Failure) -> None:
        """End with a failure those of the sequences that have not ended."""
        for sequence in sequences:
            if not sequence.is_over:
                self._end(sequence)
                sequence.collector.send_delta(Delta(sequence.rid, finish=Finish.ERROR, failure=failure))

    def abandon(self, failure: Failure) -> None:
        """End all sequences with a failure, and order the workers to abort them, because the next gateway adopts the
        workers."""
        sequences = list(self._sequences.values())
        for epoch, connection in self._connections.items():
            if rids := tuple(sequence.rid for sequence in sequences if sequence.epoch == epoch):
                self._transport.try_send(connection, Abort(rids, "gateway restarts"))
        self.fail(sequences, failure)

    def expire(self, sequences: Iterable[Sequence]) -> None:
        """End parked sequences whose deadline has passed."""
        now = asyncio.get_running_loop().time()
        self.fail(
            [sequence for sequence in sequences if sequence.deadline is not None and now >= sequence.deadline], LATE
        )

    def send(self, connection: Connection, message: Down) -> None:
        """Send a message immediately, even to a detached epoch. Raises `WorkerGone` if the worker is not connected, and
        `Unsendable` if the message cannot be encoded.
        """
        if isinstance(message, Shutdown) or (isinstance(message, Drain) and message.deadline_s > 0):
            connection.is_ending = True
        self._transport.send(connection, message)

    def ping(self, connection: Connection, t_ns: int) -> None:
        """Send a heartbeat, if the worker is connected."""
        self._seq = (self._seq + 1) & ((1 << SEQ_BITS) - 1)
        self._transport.try_send(connection, Ping(connection.epoch << SEQ_BITS | self._seq, t_ns))

    def _attached(self, epoch: int) -> Connection:
        """Return the connection of an attached epoch. Raises `WorkerGone`."""
        if (connection := self._connections.get(epoch)) is None:
            raise WorkerGone(f"no worker has epoch {epoch}")
        return connection

    def _note_unreachable(self, connection: Connection) -> None:
        connection.is_unreachable = True
        connection.post(SendFailed(connection.epoch))

    # -- messages of workers -----------------------------------------------------------------------------------------

    def wake_readers(self) -> None:
        """Wake the readers of the collectors that have new deltas. Called once per batch, so that readers get merged
        deltas.
        """
        appended, self._appended = self._appended, {}
        for collector in appended:
            collector.wake_reader()

    def _handle(self, frame: bytes) -> int:
        """Dispatch one frame. Returns how many deltas the frame counts as; a batch has a maximum number of deltas."""
        try:
            message = decode_up(frame)
        except MalformedFrame as error:
            self._note_malformed(frame, error)
            return 1
        if type(message) is Step:
            self._on_step(message)
            return 1 + len(message.deltas)
        self._on_other(message)
        return 1

    def _on_step(self, step: Step) -> None:
        epoch = step.epoch
        connection = self._connections.get(epoch)
        if connection is None:
            self._events.stale_message()
            return
        sequences, appended = self._sequences, self._appended
        now = asyncio.get_running_loop().time()
        unknown: list[int] = []
        for delta in step.deltas:
            rid = delta.rid
            sequence = sequences.get(rid)
            if sequence is None or sequence.epoch != epoch:
                if delta.finish is not None:
                    connection.unacked_aborts.discard(rid)
                elif rid >> RID_BITS != self.boot:
                    # An earlier gateway started this sequence. It is aborted, because it would otherwise run to its
                    # end.
                    unknown.append(rid)
                continue
            if delta.finish is not None:
                if _is_lost_by_worker(connection, delta.failure):
                    self._park(connection, sequence)
                    continue
                self._end(sequence)
            sequence.token_ids.extend(delta.token_ids)
            collector = sequence.collector
            if delta.prompt is not None:
                sequence.note_prompt(delta.prompt)
            else:
                sequence.has_output = True
                if delta.logprobs is not None and not sequence.token_ids:
                    sequence.echo_scored += len(delta.logprobs)
            if sequence.is_watched and delta.token_ids:
                self._report_progress(sequence)
            collector.append_delta(delta, now)
            appended[collector] = None
        if unknown:
            self._transport.try_send(connection, Abort(tuple(unknown), "gateway restarted"))
        if step.stats is not None:
            connection.stats = step.stats
        self._events.step(connection.name, step)

    def _on_other(self, message: Up) -> None:
        match message:
            case Accepted(rid, prompt_tokens, deviations, truncated):
                if sequence := self._running(rid):
                    sequence.truncated = truncated if sequence.generate.truncate else None
                    sequence.collector.note_accepted(rid, prompt_tokens, deviations, truncated)
            case Progress(rid):
                if sequence := self._running(rid):
                    sequence.collector.note_progress(message)
            case Tokenized() | Explained():
                self._calls.resolve(message)
            case Rejected(rid, failure) if rid in self._calls:
                self._calls.reject(rid, failure)
            case Rejected(rid, failure):
                if sequence := self._running(rid):
                    connection = self._connections[sequence.epoch]
                    if _is_lost_by_worker(connection, failure):
                        self._park(connection, sequence)
                    else:
                        self.fail([sequence], failure)
            case Pong():
                self._on_pong(message)
            case Hello():
                self._on_hello(message)
            case Loading() | Ready() | Drained() | Goodbye() | AdaptersSet():
                if connection := self._connections.get(message.epoch):
                    connection.post(message)
                else:
                    self._events.stale_message()
            case Step():
                raise AssertionError("_on_step handles steps")

    def _running(self, rid: int) -> Sequence | None:
        sequence = self._sequences.get(rid)
        return sequence if sequence is not None and sequence.epoch != PARKED else None

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.rid]
        if sequence.timer is not None:
            sequence.timer.cancel()
        sequence.is_over = True
        if sequence.is_watched:
            self._report_progress(sequence)

    def _report_progress(self, sequence: Sequence) -> None:
        sequence.is_watched = False
        if (connection := self._connections.get(sequence.epoch)) is not None:
            connection.post(SequenceProgressed(connection.epoch))

    def _on_pong(self, pong: Pong) -> None:
        connection = self._connections.get(pong.seq >> SEQ_BITS)
        if connection is None:
            self._events.stale_message()
            return
        connection.stats = pong.stats
        connection.post(pong)
        self._events.pong(connection.name, pong)

    def _on_hello(self, hello: Hello) -> None:
        self._transport.drop_greetings()
        if self._is_attached(hello):
            self._connections[hello.epoch].post(hello)
            return
        self._events.stale_message()
        self._transport.dismiss(hello, self._is_attached)

    def _is_attached(self, hello: Hello) -> bool:
        connection = self._connections.get(hello.epoch)
        return connection is not None and connection.name == hello.worker

    def _note_malformed(self, frame: bytes, error: MalformedFrame) -> None:
        self._events.malformed_frame()
        now = asyncio.get_running_loop().time()
        if now >= self._next_malformed_log:
            self._next_malformed_log = now + MALFORMED_LOG_INTERVAL_S
            log.warning("dropped a malformed frame of %d bytes: %s", len(frame), error)


def _is_lost_by_worker(connection: Connection, failure: Failure | None) -> bool:
    """Whether a sequence ended only because its worker is ending. The next worker must resume it."""
    if failure is None:
        return False
    # If a worker drains without a command, another process sent it a signal, or it lost its connection to this gateway.
    is_draining_itself = failure.code is Code.DRAINING and not connection.is_ending
    return failure.code is Code.WORKER_DIED or is_draining_itself
