"""Client that sends several requests on one connection through the gateway's HTTP edge, at once or one by one."""

import asyncio
from collections import deque
from dataclasses import dataclass
from random import Random

import httptools

from tests.simulation.client import PATH, Client
from tests.simulation.http_edge import HttpEdge, SimulatedTransport
from tests.simulation.world import Violated, World

# Half of the write timeout. A client that reads nothing for this long may be dropped.
STALL_S = 15.0
NONSENSE = b"\x00nonsense\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionPlan:
    """One connection, and how its client behaves. Sizes are in bytes, and times in seconds."""

    port: int
    is_pipelined: bool
    piece_max: int
    piece_s: float
    read_max: int
    read_s: float
    buffer: int
    # Time at which the client leaves, and how.
    leaves_s: float | None
    is_reset: bool
    # Whether it ends its side after its last request, or sends what is no request.
    is_half_closed: bool
    has_nonsense: bool


def draw_connection(random: Random, port: int) -> ConnectionPlan:
    is_pipelined, end = random.random() < 0.8, random.random()
    return ConnectionPlan(
        port,
        is_pipelined,
        random.choice((10, 40, 400, 100_000)),
        random.choice((0.0, 0.001, 0.05)),
        random.choice((100, 1000, 65536)),
        random.choice((0.0, 0.0, 0.02, 0.5)) if random.random() < 0.9 else 40.0,
        random.choice((500, 4000, 65536)),
        random.random() ** 2 * 5 if random.random() < 0.25 else None,
        random.random() < 0.5,
        is_pipelined and end < 0.2,
        is_pipelined and end > 0.9,
    )


class PipeliningClient:
    """Owner of one connection, and of its requests in their order."""

    def __init__(self, world: World, random: Random, plan: ConnectionPlan, clients: list[Client]) -> None:
        self.world = world
        self.clients = clients
        self.plan = plan
        self.has_left = self.has_stalled = False
        # Number of requests that were sent whole, and of answers that have begun and ended.
        self.sent = self._begun = self._ended = 0
        self._random = random
        self._parser = httptools.HttpResponseParser(self)
        self._wrong = ""
        self._send_at = 0.0
        self._pieces: deque[tuple[bytes | None, bool]] = deque()
        self._is_interim = False
        self._connection: SimulatedTransport

    async def run(self, edge: HttpEdge, secrets: list[str]) -> None:
        plan, loop = self.plan, self.world.loop
        self._edge, self._secrets = edge, secrets
        self._connection = edge.connect(plan.port, plan.buffer)
        for number in range(len(self.clients) if plan.is_pipelined else 1):
            self._send(number)
        if plan.has_nonsense:
            self._send_later(NONSENSE)
        if plan.is_half_closed:
            self._send_later(None)
        leaving = None if plan.leaves_s is None else loop.call_later(plan.leaves_s, self._leave)
        await self._read_answers()
        if leaving is not None:
            leaving.cancel()
        if not self.has_left:
            self._connection.leave()
        for client in self.clients[: max(self.sent, self._begun)]:
            self._conclude(client)

    def _leave(self) -> None:
        self.has_left = True
        if self.plan.is_reset:
            self._connection.reset()
        else:
            self._connection.leave()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _send(self, number: int) -> None:
        client = self.clients[number]
        body = client.request_body()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nauthorization: Bearer {self._secrets[number]}\r\n"
            f"x-request-id: sim-{client.plan.number}\r\n\r\n"
        )
        data = head.encode() + body
        step = max(self.plan.piece_max, len(data) // 20)
        for begin in range(0, len(data), step):
            self._send_later(data[begin : begin + step], is_last=begin + step >= len(data))

    def _send_later(self, data: bytes | None, *, is_last: bool = False) -> None:
        loop = self.world.loop
        self._send_at = max(loop.time(), self._send_at + 1e-6) + self.plan.piece_s * self._random.random()
        self._pieces.append((data, is_last))
        loop.call_at(self._send_at, self._send_next)

    def _send_next(self) -> None:
        # After a jump of the clock many pieces are due at once, and their callbacks come in any order.
        data, is_last = self._pieces.popleft()
        if not self.has_left:
            self.sent += is_last
            self._connection.send(data)

    # -- answers -------------------------------------------------------------------------------------------------------

    async def _read_answers(self) -> None:
        plan, connection = self.plan, self._connection
        while not connection.is_over:
            await connection.readable.wait()
            self._feed(connection.take(plan.read_max))
            if self._ended == len(self.clients) and not plan.has_nonsense and not plan.is_half_closed:
                # Bytes after the last answer would come soon.
                await asyncio.sleep(self._random.random() * 0.1)
                self._feed(connection.take(plan.read_max))
                return
            if plan.read_s:
                pause_s = plan.read_s * self._random.random()
                self.has_stalled |= pause_s > STALL_S
                await asyncio.sleep(pause_s)

    def _feed(self, data: bytes) -> None:
        if not data:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Violated(f"{self.plan}: {self._wrong or error}: {data!r}") from error
        if self._wrong:
            raise Violated(f"{self.plan}: {self._wrong}")

    def _conclude(self, client: Client) -> None:
        outcome = client.outcome
        outcome.has_left = self.has_left
        if not outcome.is_complete:
            outcome.is_cut = self._edge.is_shut or self.has_stalled
            # The last event may be incomplete.
            end = outcome.body.rfind(b"\n\n") + 2 if client.plan.is_streamed else 0
            del outcome.body[max(end, 0) :]
            if not (outcome.is_cut or self.has_left):
                raise Violated(f"{client.plan}: the connection has ended before its answer: {self.plan}")
        client.conclude()

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_interim = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id" and self._begun < len(self.clients):
            expected = f"sim-{self.clients[self._begun].plan.number}"
            if value.decode() != expected:
                self._wrong = f"the answer to {value.decode()} has come in place of that to {expected}"

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._is_interim = status == 100
        if self._is_interim:
            return
        if self._begun < len(self.clients):
            self.clients[self._begun].outcome.status = status
            if self._begun >= self.sent and status == 200:
                self._wrong = "an answer has come before its request was sent"
        elif not (self.plan.has_nonsense and status == 400):
            self._wrong = f"an answer with status {status} that belongs to no request"
        self._begun += 1

    def on_body(self, data: bytes) -> None:
        if self._begun <= len(self.clients):
            self.clients[self._begun - 1].outcome.body += data

    def on_message_complete(self) -> None:
        if self._is_interim:
            return
        self._ended += 1
        if self._ended <= len(self.clients):
            self.clients[self._ended - 1].outcome.is_complete = True
        if not self.plan.is_pipelined and self._ended < len(self.clients):
            self._send(self._ended)
