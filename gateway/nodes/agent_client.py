"""Client of one node's agent: orders with deadlines, and the end of ranks, told by the agent or by its silence."""

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, assert_never

import zmq
import zmq.asyncio

from protocol import node_agent, sockets
from protocol.codec import MalformedFrame
from protocol.curve import KeyPair
from protocol.failures import Failure
from protocol.node_agent import (
    PULSE_S,
    Alive,
    Answer,
    Described,
    Done,
    Exited,
    Lines,
    Order,
    Pulse,
    Refused,
    Release,
    Reserved,
    Spawned,
)

log = logging.getLogger(__name__)
A = TypeVar("A", Described, Reserved, Spawned, Lines, Done)

# An agent that has said nothing for this long is lost, and with it all that it has for us.
SILENCE_S: Final = 6.0
ANSWER_S: Final = 5.0
# Of a reservation, as the client chooses it.
NUMBER_BITS: Final = 48
# Events of libzmq's monitor.
_TROUBLES: Final[dict[int, str]] = {
    zmq.EVENT_CONNECT_RETRIED: "nothing listens there",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it has another key than ours says, or does not admit our key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it has another key than ours says",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not admit our key",
}

# After these libzmq connects no more.
_FINAL: Final = frozenset({zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL})
REFUSED_S: Final = 0.5


class NodeLost(Exception):
    """The agent did not answer in time, or has lost what it had for us."""


class NodeRefused(Exception):
    """The agent has refused an order."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of a rank. `status` is None where only its agent could know it, and that is lost."""

    status: int | None
    lines: list[str]


class AgentClient:
    """A connection to one agent. It connects again by itself; everything on one loop."""

    def __init__(
        self,
        name: str,
        address: str,
        public: str,
        own: KeyPair,
        *,
        silence_s: float = SILENCE_S,
        pulse_s: float = PULSE_S,
    ) -> None:
        self.name = name
        self.address = address
        self.public = public
        self._own = own
        self._silence_s = silence_s
        self._pulse_s = pulse_s
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = itertools.count(1)
        # Ranks that were spawned there, and what is to be told of their end.
        self._ranks: dict[int, Callable[[RankEnd], None]] = {}
        self._held: set[int] = set()
        self._boot = 0
        self._heard_at = 0.0
        self._trouble = ""
        self._context: zmq.asyncio.Context | None = None
        self._dealer: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to connect."""
        self._context = zmq.asyncio.Context()
        identity = secrets.token_bytes(16)
        self._dealer = sockets.connect_secure_dealer(
            self._context, f"tcp://{self.address}", b"g" + identity, self.public, self._own
        )
        self._heard_at = _now()
        loops = (self._receive(), self._pulse(), self._observe(self._dealer.get_monitor_socket()))
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def close(self) -> None:
        """Forget everything; what runs there ends by our silence."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose("the connection was closed")
        context, self._context = self._context, None
        if context is not None:
            context.destroy(0)

    # -- orders ------------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """A number for a new reservation, not to be guessed."""
        return secrets.randbits(NUMBER_BITS)

    async def ask(self, make: Callable[[int], Order], kind: type[A], deadline_s: float = ANSWER_S) -> A:
        """The answer to the order that `make` makes of a call's number. Raises `NodeLost`, `NodeRefused`."""
        if self._context is None:
            raise NodeLost(f"node {self.name}: the connection was closed")
        call = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            async with asyncio.timeout(deadline_s):
                await self._dealer.send(node_agent.encode(make(call)))
                said = await answer
        except TimeoutError:
            raise NodeLost(self._no_answer(deadline_s)) from None
        finally:
            self._calls.pop(call, None)
        if isinstance(said, Refused):
            raise NodeRefused(said.failure)
        if not isinstance(said, kind):
            raise NodeLost(f"node {self.name} answered with {type(said).__name__} where {kind.__name__} is expected")
        return said

    def tell(self, order: Order) -> None:
        """Send an order whose answer does not matter, unless the node cannot be reached now."""
        if self._context is None:
            return
        # Without a connection this fails at once: the order is not kept for one to come.
        self._dealer.send(node_agent.encode(order), zmq.NOBLOCK).add_done_callback(self._told)

    def _told(self, sent: asyncio.Future[None]) -> None:
        if not sent.cancelled() and (error := sent.exception()) is not None:
            log.debug("node %s cannot be told: %s", self.name, error)

    def hold(self, reservation: int) -> None:
        """Keep the agent from taking us for gone while we have this."""
        self._held.add(reservation)

    def expect_end(self, reservation: int, on_end: Callable[[RankEnd], None]) -> None:
        """Have `on_end` called once, when the rank has ended or its agent is lost."""
        self._ranks[reservation] = on_end

    def forget(self, reservation: int) -> None:
        """Nothing more is to be told of it."""
        self._ranks.pop(reservation, None)
        self._held.discard(reservation)

    # -- from the agent ----------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            frame = await self._dealer.recv()
            try:
                answer = node_agent.decode_answer(frame)
            except MalformedFrame as error:
                log.warning("node %s: an answer that cannot be read was dropped: %s", self.name, error)
                continue
            self._heard_at, self._trouble = _now(), ""
            self._handle(answer)

    def _handle(self, answer: Answer) -> None:
        match answer:
            case Exited():
                self._end(answer.reservation, RankEnd(answer.status, answer.lines[-50:]))
            case Alive():
                self._compare(answer)
            case Described() | Reserved() | Spawned() | Lines() | Done() | Refused():
                waiting = self._calls.get(answer.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            case _:
                assert_never(answer)

    def _compare(self, alive: Alive) -> None:
        """An agent that was restarted has none of our ranks, and one whose `Exited` was lost no longer has that."""
        if self._boot and alive.boot != self._boot:
            self._lose("the daemon of its node was restarted")
        self._boot = alive.boot
        known = set(alive.reservations)
        for reservation in [each for each in self._ranks if each not in known]:
            self._end(reservation, RankEnd(None, [f"node {self.name} does not have it any more"]))
        # What it has and we have not: an order to release it was lost.
        for reservation in known.difference(self._held, self._ranks):
            self.tell(Release(0, reservation))

    async def _pulse(self) -> None:
        """Say that we live while something of ours is there, and notice that the agent does not."""
        while True:
            await asyncio.sleep(self._pulse_s)
            if not self._held and not self._ranks:
                self._heard_at = _now()
                continue
            self.tell(Pulse())
            if _now() - self._heard_at > self._silence_s:
                self._lose(f"its node was silent for {self._silence_s:.0f} s{self._why()}")
                self._heard_at = _now()

    def _lose(self, why: str) -> None:
        """Everything that is there counts as ended."""
        self._boot = 0
        self._held.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(NodeLost(f"node {self.name}: {why}"))
        for reservation in list(self._ranks):
            log.error("node %s: a rank is lost: %s", self.name, why)
            self._end(reservation, RankEnd(None, [f"node {self.name}: {why}"]))

    def _end(self, reservation: int, end: RankEnd) -> None:
        on_end = self._ranks.pop(reservation, None)
        self._held.discard(reservation)
        if on_end is not None:
            on_end(end)

    async def _observe(self, monitor: Any) -> None:
        """Keep the reason for which it is not connected, for messages."""
        while True:
            frames = await monitor.recv_multipart()
            event = int.from_bytes(frames[0][:2], "little")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._trouble = ""
            elif event in _TROUBLES and not (event == zmq.EVENT_CONNECT_RETRIED and self._trouble):
                self._trouble = _TROUBLES[event]
            if event in _FINAL:
                await asyncio.sleep(REFUSED_S)
                self._connect_again()

    def _connect_again(self) -> None:
        """The other end may know our key by now."""
        with contextlib.suppress(zmq.ZMQError):  # libzmq may have forgotten the address
            self._dealer.disconnect(f"tcp://{self.address}")
        self._dealer.connect(f"tcp://{self.address}")

    def _no_answer(self, deadline_s: float) -> str:
        return f"node {self.name} ({self.address}) did not answer within {deadline_s:.0f} s{self._why()}"

    def _why(self) -> str:
        return f": {self._trouble}" if self._trouble else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
