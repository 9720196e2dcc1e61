"""The link to the workers: the table of running sequences, and the fence that keeps old epochs out."""

import asyncio
import itertools
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from gateway.link.aborts import Aborts
from gateway.link.calls import PendingCalls
from gateway.link.collector import Collector
from gateway.link.events import LinkEvents
from gateway.link.sequence import PARKED, Sequence
from gateway.link.transport import Transport, WorkerGone, frames_of
from gateway.link.worker_connection import Carrier, Connection, Progressed, Report, Runner, SendFailed
from protocol.codec import MalformedFrame, Unsendable, decode_up
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    AdaptersSet,
    Delta,
    Drained,
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
from protocol.to_worker import Abort, Detokenize, Down, Drain, Generate, Ping, Shutdown, Tokenize

log = logging.getLogger(__name__)

MALFORMED_LOG_S: Final = 1.0
# A rid is the boot in its upper half, so that what a surviving worker still says about an earlier gateway's requests
# can never be taken for ours. A Ping's seq is the epoch in its upper part: a Pong names no worker.
RID_BITS: Final = 32
SEQ_BITS: Final = 24
_LOST: Final = Failure(Code.WORKER_DIED, "the model's worker was lost; try again")
# A worker ends a sequence at its deadline; we do it so much later, for a worker that does not.
LATE_GRACE_S: Final = 1.0
LATE: Final = Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed")
UNSENDABLE: Final = Failure(Code.INVALID_REQUEST, "the request cannot be sent to the model's worker")


class WorkerLink:
    """Sends to workers, and tells each collector what was said about its sequences.

    The transport owns the sockets; everything here runs on its loop. An epoch belongs to one worker incarnation of this
    home, forever: messages of an epoch that is not attached are dropped and counted. Every sequence belongs to an
    attached epoch, or is parked: `_park` is the only way there, `resume` and the sequence's end the only ways back.
    """

    def __init__(self, run_dir: Path, events: LinkEvents, *, boot: int | None = None) -> None:
        self.boot = secrets.randbits(31) | 1 if boot is None else boot
        self.aborts = Aborts()
        self._transport = Transport(run_dir, self._handle, self.deliver)
        self.down, self.up = self._transport.down, self._transport.up
        self._events = events
        self._connections: dict[int, Connection] = {}
        self._sequences: dict[int, Sequence] = {}
        self._questions = PendingCalls()
        # Also for threads that lower requests: the next of a count is one step of the interpreter.
        self._rids = itertools.count((self.boot << RID_BITS) + 1)
        self._seq = 0
        self._next_malformed_log = 0.0
        # Whose readers have something to read.
        self._due: dict[Collector, None] = {}

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Bind both sockets. The run directory's lock must be held: stale socket files are replaced."""
        self._transport.open()

    async def run(self) -> None:
        """Read until cancelled. Raises what reading raised."""
        await self._transport.run()

    def close(self) -> None:
        """Close the sockets at once. What was not sent is dropped."""
        self._transport.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def next_rid(self) -> int:
        return next(self._rids)

    @property
    def in_flight(self) -> int:
        return len(self._sequences)

    def is_busy(self, epoch: int) -> bool:
        """Whether a worker incarnation has anything to do for us."""
        is_running = any(sequence.epoch == epoch for sequence in self._sequences.values())
        return is_running or self._questions.are_open(epoch)

    def submit(self, worker: Runner, requests: list[Generate]) -> Collector:
        """Start the sequences of one request on `worker`.

        Raises `WorkerGone` or `Unsendable`, and then none of them has started.
        """
        connection = self._connections.get(worker.epoch)
        if not worker.is_ready or connection is None:
            raise WorkerGone(f"{worker.name} is not ready")
        loop = asyncio.get_running_loop()
        now = loop.time()
        collector = Collector([request.rid for request in requests])
        frames = frames_of([connection.addressed(request) for request in requests])
        try:
            for request, frame in zip(requests, frames, strict=True):
                if (refusal := worker.refusal(request)) is not None:
                    collector.put(Delta(request.rid, finish=Finish.ERROR, failure=refusal))
                    continue
                deadline = now + request.deadline_ms / 1000 if request.deadline_ms else None
                self._sequences[request.rid] = Sequence.begin(request, worker.epoch, collector, deadline)
                self._transport.send_frame(connection, frame)
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
        """Let a parked sequence go on at the worker of `epoch`. Raises `WorkerGone`; then it stays parked.

        One that is too large to be sent with what its client has ends.
        """
        now = asyncio.get_running_loop().time()
        if sequence.deadline is not None and now >= sequence.deadline:
            self.fail([sequence], LATE)
            return
        connection = self._attached(epoch)
        try:
            self._transport.send(connection, connection.addressed(sequence.continuation(now)))
        except WorkerGone:
            self._note_unreachable(connection)
            raise
        except Unsendable as error:
            log.error("worker %s: sequence %d cannot be resumed: %s", connection.name, sequence.rid, error)
            self.fail([sequence], UNSENDABLE)
            return
        sequence.epoch = epoch
        sequence.given = len(sequence.token_ids)
        sequence.resumes += 1

    async def ask(self, epoch: int, question: Tokenize | Detokenize) -> Tokenized:
        """A worker's answer. Raises `Refused`, also when the worker dies over it, `WorkerGone` and `Unsendable`."""
        connection = self._attached(epoch)
        with self._questions.asking(epoch, question.rid) as answer:
            self.send(connection, question)
            try:
                return await answer
            except asyncio.CancelledError:  # its client has left, or will not wait any longer
                self._transport.try_send(connection, Abort((question.rid,)))
                raise

    def abort(self, rids: Iterable[int], reason: str) -> None:
        """Stop sequences and forget them. Unknown and finished rids are ignored."""
        by_epoch: defaultdict[int, list[int]] = defaultdict(list)
        for rid in rids:
            sequence = self._sequences.get(rid)
            if sequence is None:
                continue
            self._end(sequence)
            sequence.collector.close()
            by_epoch[sequence.epoch].append(rid)
        for epoch, own in by_epoch.items():
            if (connection := self._connections.get(epoch)) is not None:
                self.aborts.sent(epoch, own)
                self._transport.try_send(connection, Abort(tuple(own), reason))

    def stop(self, rids: Iterable[int], reason: str, failure: Failure | None = None) -> None:
        """Abort sequences whose reader goes on reading: it is told that they ended, and of a failure if it was one."""
        running = [sequence for rid in rids if (sequence := self._sequences.get(rid)) is not None]
        self.abort([sequence.rid for sequence in running], reason)
        finish = Finish.ABORT if failure is None else Finish.ERROR
        for sequence in running:
            sequence.collector.put(Delta(sequence.rid, finish=finish, failure=failure))

    # -- workers -----------------------------------------------------------------------------------------------------

    def attach(
        self,
        name: str,
        epoch: int,
        post: Callable[[Report], None],
        park: Callable[[Sequence], None],
        carrier: Carrier | None = None,
    ) -> Connection:
        """Let the messages of an epoch in. What is sent to it goes by `carrier`, if it has one."""
        connection = self._connections[epoch] = Connection(name, epoch, post, park, carrier)
        return connection

    def detach(self, epoch: int) -> None:
        """Fence an epoch off, and park its unfinished sequences."""
        connection = self._connections.pop(epoch, None)
        if connection is None:
            return
        self.aborts.forget(epoch)
        self._questions.lost(epoch, _LOST)
        for sequence in [sequence for sequence in self._sequences.values() if sequence.epoch == epoch]:
            self._park(connection, sequence)

    def _park(self, connection: Connection, sequence: Sequence) -> None:
        """Park a sequence that its worker has lost: nothing that is said about it counts until it is resumed."""
        sequence.epoch = PARKED
        connection.park(sequence)

    def fail(self, sequences: Iterable[Sequence], failure: Failure) -> None:
        """End sequences with a failure, those of them that have not ended."""
        for sequence in sequences:
            if not sequence.is_over:
                self._end(sequence)
                sequence.collector.put(Delta(sequence.rid, finish=Finish.ERROR, failure=failure))

    def abandon(self, failure: Failure) -> None:
        """End everything: at the workers, which go on without us, and for the clients."""
        sequences = list(self._sequences.values())
        for epoch, connection in self._connections.items():
            if rids := tuple(sequence.rid for sequence in sequences if sequence.epoch == epoch):
                self._transport.try_send(connection, Abort(rids, "gateway restarts"))
        self.fail(sequences, failure)

    def expire(self, sequences: Iterable[Sequence]) -> None:
        """End the parked sequences whose deadline has passed: no worker does it for them."""
        now = asyncio.get_running_loop().time()
        self.fail(
            [sequence for sequence in sequences if sequence.deadline is not None and now >= sequence.deadline], LATE
        )

    def send(self, connection: Connection, message: Down) -> None:
        """Send at once, also to an epoch that was detached. Raises `WorkerGone` when the worker is not connected, and
        `Unsendable`."""
        if isinstance(message, Shutdown) or (isinstance(message, Drain) and message.deadline_s > 0):
            connection.is_ending = True
        self._transport.send(connection, message)

    def ping(self, connection: Connection, t_ns: int) -> None:
        """Send a heartbeat. A worker that is gone is noticed elsewhere."""
        self._seq = (self._seq + 1) & ((1 << SEQ_BITS) - 1)
        self._transport.try_send(connection, Ping(connection.epoch << SEQ_BITS | self._seq, t_ns))

    def _attached(self, epoch: int) -> Connection:
        """Raises `WorkerGone`."""
        if (connection := self._connections.get(epoch)) is None:
            raise WorkerGone(f"no worker has epoch {epoch}")
        return connection

    def _note_unreachable(self, connection: Connection) -> None:
        connection.is_unreachable = True
        connection.post(SendFailed(connection.epoch))

    # -- what is said by carriers --------------------------------------------------------------------------------------

    def receive(self, epoch: int, message: Accepted | Rejected | Progress | Step | Tokenized) -> None:
        """Take what the runner of `epoch` said by its carrier, of its own sequences only. `deliver` follows."""
        if isinstance(message, Step):
            self._on_step(replace(message, epoch=epoch, stats=None))
        elif self._is_of(epoch, message.rid):
            self._on_other(message)
        else:
            self._events.stale_message()

    def _is_of(self, epoch: int, rid: int) -> bool:
        sequence = self._sequences.get(rid)
        return self._questions.is_asked(epoch, rid) if sequence is None else sequence.epoch == epoch

    # -- what workers say --------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        """Hand on what has come, after all that is there, so that several deltas for one reader are one."""
        due, self._due = self._due, {}
        for collector in due:
            collector.deliver()

    def _handle(self, frame: bytes) -> int:
        """Dispatch one frame. Returns how much work it was, in deltas."""
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
        sequences, due = self._sequences, self._due
        now = asyncio.get_running_loop().time()
        strangers: list[int] | None = None
        for delta in step.deltas:
            rid = delta.rid
            sequence = sequences.get(rid)
            if sequence is None or sequence.epoch != epoch:
                if delta.finish is not None:
                    self.aborts.ended(epoch, rid)
                # Just aborted, or begun by an earlier gateway: then nothing else will ever stop it.
                if rid >> RID_BITS != self.boot and delta.finish is None:
                    strangers = [*(strangers or ()), rid]
                continue
            if delta.finish is not None:
                if _is_given_up(connection, delta.failure):
                    self._park(connection, sequence)
                    continue
                self._end(sequence)
            sequence.token_ids.extend(delta.token_ids)
            collector = sequence.collector
            if delta.prompt is not None:
                sequence.note_prompt(delta.prompt)
            elif delta.logprobs is not None and not sequence.token_ids:
                sequence.is_begun = True
                sequence.echo_scored += len(delta.logprobs)
            else:
                sequence.is_begun = True
            if sequence.is_watched and delta.token_ids:
                self._note_progress(sequence)
            collector.add(delta, now)
            due[collector] = None
        if strangers:
            self._transport.try_send(connection, Abort(tuple(strangers), "gateway restarted"))
        if step.stats is not None:
            connection.stats = step.stats
        self._events.step(connection.name, step)

    def _on_other(self, message: Up) -> None:
        match message:
            case Accepted(rid, prompt_tokens, relaxed, left_out):
                if sequence := self._running(rid):
                    sequence.left_out = left_out if sequence.generate.truncate else None
                    sequence.collector.note_accepted(rid, prompt_tokens, relaxed, left_out)
            case Progress(rid, processed, total, cached):
                if sequence := self._running(rid):
                    sequence.collector.note_progress(rid, processed, total, cached)
            case Tokenized():
                self._questions.answered(message)
            case Rejected(rid, failure) if rid in self._questions:
                self._questions.refused(rid, failure)
            case Rejected(rid, failure):
                if sequence := self._running(rid):
                    connection = self._connections[sequence.epoch]
                    if _is_given_up(connection, failure):
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
                raise AssertionError("steps go the short way")

    def _running(self, rid: int) -> Sequence | None:
        sequence = self._sequences.get(rid)
        return sequence if sequence is not None and sequence.epoch != PARKED else None

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.rid]
        if sequence.timer is not None:
            sequence.timer.cancel()
        sequence.is_over = True
        if sequence.is_watched:
            self._note_progress(sequence)

    def _note_progress(self, sequence: Sequence) -> None:
        sequence.is_watched = False
        if (connection := self._connections.get(sequence.epoch)) is not None:
            connection.post(Progressed(connection.epoch))

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
            self._next_malformed_log = now + MALFORMED_LOG_S
            log.warning("dropped a malformed frame of %d bytes: %s", len(frame), error)


def _is_given_up(connection: Connection, failure: Failure | None) -> bool:
    """Whether this end is not the sequence's but its worker's: then it goes on at the next one."""
    if failure is None:
        return False
    # A worker that drains without our command got a signal from outside, or lost its connection to us.
    is_unasked = failure.code is Code.DRAINING and not connection.is_ending
    return failure.code is Code.WORKER_DIED or is_unasked
