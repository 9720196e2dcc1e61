"""Agent of this node: shares memory and runs ranks for the gateways of other nodes, as `protocol.node_agent` has it.

What it promises, whatever a gateway asks for:

- It runs ranks of models that this machine's own configuration and model cache have, by their form; the path is its
  own. There is no order that names a program, a file or a variable of the environment.
- Memory comes from this machine's broker. It is held until the time of a reservation is over, then it is taken back.
- A gateway that is silent, or that has lost this agent, leaves nothing behind: its ranks end.
- A gateway sees and touches its own reservations only.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol, assert_never

import zmq
import zmq.asyncio

from gateway.nodes.reservations import Reservation, Reservations, Stage, label_of
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.state import ModelUnavailable
from protocol import node_agent, sockets
from protocol.codec import MalformedFrame
from protocol.curve import KeyPair, fingerprint
from protocol.failures import Code, Failure
from protocol.key_guard import AllowedKeys, guard, sender
from protocol.node_agent import (
    Alive,
    Answer,
    Commit,
    Describe,
    Described,
    Done,
    Exited,
    Lines,
    Logs,
    Order,
    Pulse,
    Refused,
    Release,
    Reserve,
    Reserved,
    Signal,
    Spawn,
    Spawned,
)

log = logging.getLogger(__name__)

# Signals that a gateway may have sent to a rank of its own.
SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGABRT, signal.SIGKILL})
UNKNOWN_EXIT: Final = 255
# Until the last words of an agent are read.
FAREWELL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """Limits of an agent; times in seconds."""

    reservations: int = 32
    reservations_of_one: int = 16
    # Questions about a model, which read its files, of one key at a time.
    questions: int = 4
    # A gateway that said nothing for this long is gone.
    silence_s: float = 10.0
    look_s: float = 0.25
    # From SIGTERM to SIGABRT, and to SIGKILL: a rank in a collective handles no signal in Python.
    term_s: float = 2.0
    abort_s: float = 3.0


class NodeHost(Protocol):
    """This machine as an agent uses it."""

    def describe(self, call: int, form: str) -> Described: ...
    def find(self, model: str, form: str) -> str:
        """The path of this machine's own copy with that form; empty where it has none. Reads files: not on the loop."""
        ...

    async def grant(self, label: str, size_bytes: int) -> None:
        """Return when the memory is this reservation's. May be cancelled. Raises `ModelUnavailable`."""
        ...

    def give_back(self, label: str, pid: int) -> None:
        """The memory is free again; `pid` is the process that has held it, 0 for none."""
        ...

    def spawn(self, label: str, path: str, spec: bytes, order: Reserve) -> WorkerPort:
        """Start the rank that memory was reserved for. Raises `OSError`, and `ValueError` for what is no specification
        of it."""
        ...


class Agent:
    """Serves the orders of other nodes' gateways; everything on one loop. `nodes` are the names by public key."""

    def __init__(
        self, address: str, own: KeyPair, nodes: Callable[[], Mapping[str, str]], host: NodeHost, limits: AgentLimits
    ) -> None:
        self._address = address
        self._own = own
        self._nodes = nodes
        self._host = host
        self._limits = limits
        self._reservations = Reservations(limits.reservations, limits.reservations_of_one)
        self._heard: dict[str, float] = {}
        self._asking: dict[str, int] = {}
        # Keys of strangers, of which the log has told; few.
        self.refused_keys: set[str] = set()
        self._boot = host.describe(0, "").boot
        self._tasks: asyncio.TaskGroup | None = None
        self._context: zmq.asyncio.Context | None = None
        self._router: Any = None

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Listen. Raises `zmq.ZMQError`."""
        self._context = zmq.asyncio.Context()
        self._guard = guard(self._context, AllowedKeys(self._nodes, self._refuse_key))
        with ExitStack() as undo:
            # A context with open sockets would wait for them at its end.
            undo.callback(self._context.destroy, 0)
            undo.callback(self._guard.stop)
            self._router = sockets.bind_secure_router(self._context, f"tcp://{self._address}", self._own)
            undo.pop_all()

    @property
    def endpoint(self) -> str:
        """Address that it listens on, with the port that it got."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    async def run(self) -> None:
        """Serve until cancelled; then all that was started here is ended."""
        assert self._context is not None, "open() comes first"
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._look_after())
                await self._receive()
        finally:
            try:
                self._leave()
                if self._heard:
                    # A gateway drops what it has not read of a connection that ends.
                    await asyncio.sleep(FAREWELL_S)
            finally:
                self._guard.stop()
                self._context.destroy(0)

    def _leave(self) -> None:
        """End everything at once, and tell those whose it was."""
        for reservation in self._reservations:
            if (process := reservation.process) is not None:
                process.signal(signal.SIGKILL)
                process.close()
            exited = Exited(reservation.number, -signal.SIGKILL, ["the daemon of its node has ended"])
            self._say(reservation.identity, exited)
            self._host.give_back(reservation.label, 0 if process is None else process.pid)

    async def _receive(self) -> None:
        while True:
            frames = await self._router.recv_multipart(copy=False)
            try:
                identity, payload = frames
                owner, order = sender(payload), node_agent.decode_order(payload.bytes)
            except (ValueError, MalformedFrame) as error:
                log.warning("an order that cannot be read was dropped: %s", error)
                continue
            if owner not in self._nodes():
                continue  # was removed from the configuration; its connection is still there
            self._heard[owner] = self._now()
            try:
                await self._obey(owner, identity.bytes, order)
            except Exception:  # An order must never end the agent, under which others' ranks run.
                log.exception("internal error in an order of node %s", self._name(owner))

    async def _look_after(self) -> None:
        """Take back what was not committed in time, and end what silent gateways have left."""
        while True:
            await asyncio.sleep(self._limits.look_s)
            now = self._now()
            for owner in self._reservations.owners():
                silence_s = now - self._heard.get(owner, now)
                is_known = owner in self._nodes()
                if silence_s > self._limits.silence_s or not is_known:
                    why = f"it was silent for {silence_s:.0f} s" if is_known else "it is not configured any more"
                    log.warning("node %s: its reservations end: %s", self._name(owner), why)
                    for reservation in self._reservations.of(owner):
                        self._end(reservation)
            for reservation in self._reservations:
                if reservation.stage is Stage.HELD and now >= reservation.expires_at:
                    log.info("%s: its time is over", reservation.label)
                    self._end(reservation)

    # -- orders ------------------------------------------------------------------------------------------------------

    async def _obey(self, owner: str, identity: bytes, order: Order) -> None:
        match order:
            case Describe():
                self._on_describe(owner, identity, order)
            case Reserve():
                await self._on_reserve(owner, identity, order)
            case Pulse():
                numbers = [each.number for each in self._reservations.of(owner) if each.stage is not Stage.ENDING]
                await self._send(identity, Alive(self._boot, numbers))
            case Commit() | Spawn() | Signal() | Logs() | Release():
                reservation = self._reservations.find(owner, order.reservation)
                if reservation is None or reservation.stage is Stage.ENDING:
                    await self._refuse(identity, order.call, f"there is no reservation {order.reservation}")
                else:
                    await self._send(identity, self._on_reserved(reservation, order))
            case _:
                assert_never(order)

    def _on_reserved(self, reservation: Reservation, order: Commit | Spawn | Signal | Logs | Release) -> Answer:
        """Obey an order about a reservation that there is."""
        process = reservation.process
        match order:
            case Commit() if reservation.stage is Stage.HELD:
                reservation.stage = Stage.COMMITTED
            case Spawn() if reservation.stage is Stage.COMMITTED:
                return self._spawn(reservation, order)
            case Signal() if process is not None:
                if order.signum not in SIGNALS:
                    return _refused(order.call, f"signal {order.signum} is not sent")
                process.signal(order.signum)
            case Logs():
                return Lines(order.call, [] if process is None else process.last_lines())
            case Release():
                self._end(reservation)
            case Commit() | Spawn() | Signal():
                return _refused(order.call, f"reservation {order.reservation} is {reservation.stage.name.lower()}")
        return Done(order.call)

    def _on_describe(self, owner: str, identity: bytes, order: Describe) -> None:
        if self._asking.get(owner, 0) >= self._limits.questions:
            self._start(self._refuse(identity, order.call, "too many questions at once", Code.BUSY))
            return
        self._asking[owner] = self._asking.get(owner, 0) + 1
        self._start(self._describe(owner, identity, order))

    async def _describe(self, owner: str, identity: bytes, order: Describe) -> None:
        try:
            path = await asyncio.to_thread(self._host.find, order.model, order.form) if order.form else ""
            await self._send(identity, self._host.describe(order.call, order.form if path else ""))
        finally:
            self._asking[owner] -= 1

    async def _on_reserve(self, owner: str, identity: bytes, order: Reserve) -> None:
        failure = self._reservations.refusal(owner, order)
        if failure is not None:
            await self._send(identity, Refused(order.call, failure))
            return
        reservation = Reservation(owner, identity, order, label_of(order, self._name(owner)))
        self._reservations.add(reservation)
        reservation.task = self._start(self._reserve(reservation))

    async def _reserve(self, reservation: Reservation) -> None:
        order, is_held = reservation.order, False
        try:
            reservation.path = await asyncio.to_thread(self._host.find, order.model, order.form)
            if not reservation.path:
                why = f"has no model of the form {order.form[:8]} ({order.model})"
                await self._refuse(reservation.identity, order.call, why, Code.MODEL_MISSING)
                return
            await self._host.grant(reservation.label, order.size_bytes)
            is_held = True
            reservation.stage = Stage.HELD
            reservation.expires_at = self._now() + order.ttl_s
            log.info("%s: %d MiB are reserved", reservation.label, order.size_bytes >> 20)
            await self._send(reservation.identity, Reserved(order.call, order.size_bytes, order.form))
        except ModelUnavailable as error:
            await self._send(reservation.identity, Refused(order.call, error.failure))
        except asyncio.CancelledError:
            # Released, or the daemon ends: its gateway may still wait for an answer.
            self._say(reservation.identity, _refused(order.call, "the reservation has ended", Code.BUSY))
            raise
        finally:
            if not is_held:
                self._reservations.remove(reservation)

    def _spawn(self, reservation: Reservation, order: Spawn) -> Answer:
        label = reservation.label
        try:
            process = self._host.spawn(label, reservation.path, order.spec, reservation.order)
        except (OSError, ValueError) as error:
            log.error("%s: cannot be started: %s", label, error)
            return _refused(order.call, f"the rank cannot be started: {error}", Code.INTERNAL)
        reservation.process, reservation.stage = process, Stage.RUNNING
        self._start(self._watch(reservation, process))
        log.info("%s: started, pid %d", label, process.pid)
        return Spawned(order.call, process.pid)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _end(self, reservation: Reservation) -> None:
        """Give the memory back; of a rank that runs once its process has ended."""
        stage, reservation.stage = reservation.stage, Stage.ENDING
        if reservation.process is not None:
            if stage is not Stage.ENDING:
                reservation.task = self._start(self._escalate(reservation.process))
            return
        if stage is Stage.WAITING and reservation.task is not None:
            reservation.task.cancel()
        elif stage in (Stage.HELD, Stage.COMMITTED):
            self._host.give_back(reservation.label, 0)
        self._reservations.remove(reservation)

    async def _escalate(self, process: WorkerPort) -> None:
        process.signal(signal.SIGTERM)
        await asyncio.sleep(self._limits.term_s)
        process.signal(signal.SIGABRT)
        await asyncio.sleep(self._limits.abort_s)
        process.signal(signal.SIGKILL)

    async def _watch(self, reservation: Reservation, process: WorkerPort) -> None:
        status = await process.wait()
        lines, pid = process.last_lines(), process.pid
        if reservation.task is not None:
            reservation.task.cancel()
        process.close()
        log.info("%s: ended with status %s", reservation.label, status)
        self._reservations.remove(reservation)
        self._host.give_back(reservation.label, pid)
        await self._send(
            reservation.identity, Exited(reservation.number, UNKNOWN_EXIT if status is None else status, lines)
        )

    # -- answers -----------------------------------------------------------------------------------------------------

    async def _refuse(self, identity: bytes, call: int, why: str, code: Code = Code.INVALID_REQUEST) -> None:
        await self._send(identity, _refused(call, why, code))

    async def _send(self, identity: bytes, answer: Answer) -> None:
        try:
            await self._router.send_multipart((identity, node_agent.encode(answer)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # Its gateway is gone, or takes nothing: silence ends what it has here.
            log.info("an answer could not be sent: %s", error)

    def _say(self, identity: bytes, answer: Answer) -> None:
        """The same from where nothing can be waited for."""
        self._router.send_multipart((identity, node_agent.encode(answer)), zmq.NOBLOCK).add_done_callback(_ignore)

    def _refuse_key(self, public: str) -> None:
        # Strangers can come at any rate: each key is named once, and few of them.
        if public not in self.refused_keys and len(self.refused_keys) < 100:
            self.refused_keys.add(public)
            log.warning("refused a node of an unknown key, fingerprint %s", fingerprint(public))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "run() comes first"
        return self._tasks.create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # The root of a task: what one order runs into must not end the others.
            log.exception("internal error in the agent")

    def _name(self, owner: str) -> str:
        return self._nodes().get(owner) or fingerprint(owner)[:9]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _refused(call: int, why: str, code: Code = Code.INVALID_REQUEST) -> Refused:
    return Refused(call, Failure(code, why))


def _ignore(sent: asyncio.Future[None]) -> None:
    """Take note of its error: the gateway is gone as well."""
    if not sent.cancelled():
        sent.exception()
