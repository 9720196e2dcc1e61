"""Clients of every kind for the HTTP edge, each made from a seed: what it sends, how, and what must come back."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.http.connection import PIPELINED_BYTES_MAX
from tests.support.scale import patient

DEADLINE_S: Final = 60
# What the system takes for a client that does not read.
SMALL_BUFFER: Final = 4096
PUSHES: Final = 500
SMUGGLED: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-request-id: smuggled\r\n\r\n"
OFFERS: Final = (b"h2c", b"websocket", b"TLS/1.0", b"h2c, websocket", b"x")


@dataclass(frozen=True, slots=True)
class Request:
    """Raw bytes of a request, and the statuses that its one answer may have."""

    id: str
    data: bytes
    statuses: tuple[int, ...]
    is_last: bool = False


@dataclass(slots=True)
class Answer:
    """One that came."""

    status: int
    id: str
    body: bytes
    is_whole: bool


@dataclass(slots=True)
class Findings:
    """Findings of the clients of a run."""

    kinds: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
    # Connections that ended before all of their requests were answered: idle ones give way.
    cut_short: int = 0


class Maker:
    """Requests of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._seed = seed
        self._count = 0

    def request(self, *, is_last: bool = False, max_tokens: int = 3) -> Request:
        """Any that is well formed."""
        self._count += 1
        id = f"r{self._seed}-{self._count}"
        draw = self.random
        fields = [b"host: localhost", b"x-request-id: " + id.encode()]
        if draw.random() < 0.3:
            fields += [b"connection: upgrade, HTTP2-Settings", b"upgrade: " + draw.choice(OFFERS)]
        if draw.random() < 0.3:
            fields += [b"x-%d: %b" % (number, b"v" * draw.randrange(50)) for number in range(draw.randrange(20))]
        if is_last:
            fields.append(b"connection: close")
        draw.shuffle(fields)
        if draw.random() < 0.4:
            path = draw.choice([b"/livez", b"/v1/models", b"/nope", b"/livez?a=b"])
            head = b"\r\n".join([b"GET %b HTTP/1.1" % path, *fields]) + b"\r\n\r\n"
            return Request(id, head, (404,) if path == b"/nope" else (200,), is_last)
        body, statuses = self._body(max_tokens)
        path = b"/v1/completions"
        if draw.random() < 0.2:
            # Answered before its body has come.
            path, statuses = b"/nope", (404,)
        if draw.random() < 0.5:
            fields.append(b"content-length: %d" % len(body))
            body = bytes(body)
        else:
            fields.append(b"transfer-encoding: chunked")
            body = self.chunked(body)
        head = b"\r\n".join([b"POST %b HTTP/1.1" % path, *fields]) + b"\r\n\r\n"
        return Request(id, head + body, statuses, is_last)

    def _body(self, max_tokens: int) -> tuple[bytes, tuple[int, ...]]:
        draw = self.random.random()
        if draw < 0.2:
            return SMUGGLED, (400,)
        if draw < 0.4:
            return b'{"model": "nobody", "prompt": "hi"}', (404,)
        body = {"model": "m", "prompt": "hi", "max_tokens": self.random.randint(1, max_tokens), "stream": draw < 0.7}
        return json.dumps(body).encode() + b" " * self.random.choice([0, 0, 0, 70_000]), (200,)

    def chunked(self, body: bytes) -> bytes:
        """With extensions and trailers, both within bounds."""
        pieces: list[bytes] = []
        while body:
            size = min(len(body), self.random.choice([1, 7, 64, 4096, 65536]))
            pieces.append(b"%x%b\r\n%b\r\n" % (size, self.random.choice([b"", b";a", b';a="b"']), body[:size]))
            body = body[size:]
        trailers = b"".join(
            b"%b: %d\r\n" % (self.random.choice([b"connection", b"x-request-id", b"content-encoding", b"t"]), n)
            for n in range(self.random.choice([0, 0, 1, 5]))
        )
        return b"".join([*pieces, b"0\r\n", trailers, b"\r\n"])

    def pieces(self, data: bytes) -> list[bytes]:
        """`data`, cut at random: now and then into single bytes."""
        draw = self.random
        if draw.random() < 0.3:
            return [data]
        if draw.random() < 0.2:
            return [data[at : at + 1] for at in range(min(len(data), 300))] + [data[300:]]
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randint(1, 6)))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def mutated(self, data: bytes) -> bytes:
        """With some bytes changed, doubled or gone."""
        made = bytearray(data)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(made))
            match self.random.randrange(4):
                case 0:
                    made[at] = self.random.randrange(256)
                case 1:
                    made[at:at] = self.random.choice([b"\r\n", b"\n", b"\0", b":", b" ", b"\r\n\r\n", b"0\r\n\r\n"])
                case 2:
                    del made[at : at + self.random.randint(1, 20)]
                case _:
                    made[at:at] = made[at : at + self.random.randint(1, 40)]
        return bytes(made) or b"\r\n"


class Client:
    """One connection. Reads all that comes, unless it is told not to."""

    def __init__(self, port: int, maker: Maker) -> None:
        self._port = port
        self._maker = maker
        self.said = bytearray()

    async def __aenter__(self) -> "Client":
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = asyncio.get_running_loop()
        await self._loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, data: bytes) -> bool:
        """All of it, in pieces. False when the server has closed."""
        try:
            for piece in self._maker.pieces(data):
                await self._loop.sock_sendall(self._socket, piece)
                await asyncio.sleep(self._maker.random.choice([0, 0, 0, 0.002]))
        except ConnectionError:
            return False
        return True

    async def push(self, data: bytes) -> None:
        """As it is, and a turn for those who read. Raises `ConnectionError`."""
        await self._loop.sock_sendall(self._socket, data)
        await asyncio.sleep(0)

    async def read(self) -> bool:
        """Until the server closes. False when it reset the connection."""
        try:
            while data := await self._loop.sock_recv(self._socket, 65536):
                self.said += data
        except ConnectionError:
            return False
        return True

    def take_little(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)

    def half_close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def answers(self) -> list[Answer]:
        """Those that have come. Raises `ValueError` where they are no HTTP."""
        rest, found = bytes(self.said), list[Answer]()
        while rest:
            head, end, rest = rest.partition(b"\r\n\r\n")
            version, status = head[:9], head[9:12]
            if version != b"HTTP/1.1 " or not status.isdigit():
                raise ValueError(f"no status line: {head[:200]!r}")
            if status == b"100" and end:
                continue
            lines = [line.partition(b": ") for line in head.lower().split(b"\r\n")[1:]]
            fields = {name: value for name, _, value in lines}
            body, rest, is_whole = _body_of(fields, rest)
            found.append(Answer(int(status), fields.get(b"x-request-id", b"").decode(), body, bool(end) and is_whole))
        return found


def _body_of(fields: dict[bytes, bytes], rest: bytes) -> tuple[bytes, bytes, bool]:
    if b"transfer-encoding" not in fields:
        length = int(fields.get(b"content-length", b"0"))
        return rest[:length], rest[length:], len(rest) >= length
    body = b""
    while True:
        size, end, after = rest.partition(b"\r\n")
        if not end or len(after) < int(size, 16) + 2:
            return body, b"", False
        length = int(size, 16)
        if after[length : length + 2] != b"\r\n":
            raise ValueError(f"no chunk: {rest[:100]!r}")
        body, rest = body + after[:length], after[length + 2 :]
        if not length:
            return body, rest, True


Kind = Callable[[int, Maker, Findings], Awaitable[None]]


async def well_formed(port: int, maker: Maker, findings: Findings) -> None:
    """Requests one after the other or all at once: each has its own answer, in their order, and no other comes."""
    count = maker.random.randint(1, 8)
    requests = [maker.request() for _ in range(count)] + [maker.request(is_last=True)]
    async with Client(port, maker) as client:
        reading = asyncio.create_task(client.read())
        await client.send(b"".join(request.data for request in requests))
        if maker.random.random() < 0.3:
            client.half_close()
        await reading
        _compare(client, requests, findings)


def _compare(client: Client, requests: list[Request], findings: Findings) -> None:
    sent = b"".join(request.data for request in requests)[:3000]
    # Then what is left is not answered, if it comes too early.
    is_long = sum(len(request.data) for request in requests[1:]) > PIPELINED_BYTES_MAX
    try:
        answers = client.answers()
    except ValueError as error:
        findings.problems.append(f"well_formed: {error}, after {sent!r}")
        return
    for answer, request in zip(answers, requests, strict=False):
        if answer.id != request.id or answer.status not in request.statuses:
            findings.problems.append(f"well_formed: {answer} for {request.id} {request.statuses} of {sent!r}")
            return
    if len(answers) < len(requests) and not is_long:
        findings.cut_short += 1
    if len(answers) > len(requests):
        findings.problems.append(f"well_formed: {len(answers)} answers to {len(requests)} requests {sent!r}")
    elif not all(answer.is_whole for answer in answers):
        findings.problems.append(f"well_formed: an answer was cut off: {bytes(client.said[-300:])!r} to {sent!r}")


async def malformed(port: int, maker: Maker, findings: Findings) -> None:
    """Whatever comes back is HTTP, and no request is answered twice."""
    data = maker.mutated(b"".join(maker.request().data for _ in range(maker.random.randint(1, 4))))
    async with Client(port, maker) as client:
        reading = asyncio.create_task(client.read())
        await client.send(data)
        client.half_close()
        await reading
        try:
            ids = [answer.id for answer in client.answers() if answer.id and not answer.id.startswith("req_")]
        except ValueError as error:
            findings.problems.append(f"malformed: {error}, after {data[:3000]!r}")
            return
        if len(ids) > data.lower().count(b"x-request-id"):
            findings.problems.append(f"malformed: {ids} answered after {data[:3000]!r}")


async def endless(port: int, maker: Maker, findings: Findings) -> None:
    """A head, trailers, framing or a late body that never ends is cut off."""
    chunked = b"POST %b HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    path = maker.random.choice([b"/nope", b"/v1/completions"])
    start, piece = maker.random.choice([
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 500),
        (b"GET /", b"a" * 3000),
        (b"GET / HTTP/1.1\r\na: ", b"b" * 3000),
        (chunked % path + b"0\r\n", b"a: b\r\n" * 500),
        (chunked % path + b"0\r\na: ", b"b" * 3000),
        (chunked % path + b"5;", b"b" * 3000),
        (b"\r\n", b"\r\n" * 3000),
        (chunked % b"/nope", b"1\r\na\r\n" * 500),
        (b"POST /nope HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n", b"a" * 60_000),
    ])  # fmt: skip
    async with Client(port, maker) as client:
        reading = asyncio.create_task(client.read())
        await client.send(start)
        with contextlib.suppress(ConnectionError):
            pushes = 0
            while not reading.done():
                await client.push(piece)
                pushes += 1
                if pushes > PUSHES:
                    # The system takes megabytes for a server that has no time.
                    await asyncio.sleep(0.01)
        client.half_close()
        await reading
        if client.said.count(b"HTTP/1.1 ") > 1:
            findings.problems.append(f"endless: {bytes(client.said[:500])!r} to {start!r}")


async def never_reading(port: int, maker: Maker, findings: Findings) -> None:
    """Asks for much, and takes nothing."""
    del findings
    async with Client(port, maker) as client:
        client.take_little()
        path = maker.random.choice([b"/openapi.json", b"/metrics", b"/livez"])
        request = b"GET %b HTTP/1.1\r\nhost: localhost\r\n\r\n" % path
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(maker.random.choice([0.1, 2.0])):
                await client.send(request * maker.random.randint(1, 300))
                await asyncio.sleep(maker.random.choice([0.1, 2.0]))


async def slow(port: int, maker: Maker, findings: Findings) -> None:
    """Sends a byte now and then, and gives up."""
    del findings
    data = maker.request().data
    async with Client(port, maker) as client:
        for at in range(min(len(data) - 1, maker.random.randint(1, 40))):
            if not await client.send(data[at : at + 1]):
                return
            await asyncio.sleep(0.02)


async def leaving(port: int, maker: Maker, findings: Findings) -> None:
    """Leaves at any time, with requests behind the one that is answered, or resets."""
    del findings
    requests = b"".join(maker.request(max_tokens=10_000).data for _ in range(maker.random.randint(1, 4)))
    async with Client(port, maker) as client:
        reading = asyncio.create_task(client.read())
        await client.send(requests)
        await asyncio.sleep(maker.random.random() * 0.2)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        if maker.random.random() < 0.5:
            client.reset()


async def idle(port: int, maker: Maker, findings: Findings) -> None:
    """Many connections that say nothing, or not enough."""
    del findings
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(maker.random.randint(1, 60)):
            client = await stack.enter_async_context(Client(port, maker))
            with contextlib.suppress(ConnectionError):
                await client.send(maker.random.choice([b"", b"G", b"GET / HTTP/1.1\r\n", b"\r\n"]))
        await asyncio.sleep(maker.random.random())


async def old(port: int, maker: Maker, findings: Findings) -> None:
    """HTTP/1.0: no chunks, and the end is the connection's."""
    body = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 3, "stream": True}).encode()
    fields = b"x-request-id: old\r\ncontent-length: %d\r\nconnection: %b\r\n" % (
        len(body), maker.random.choice([b"close", b"keep-alive", b"upgrade\r\nupgrade: h2c"])
    )  # fmt: skip
    async with Client(port, maker) as client:
        reading = asyncio.create_task(client.read())
        await client.send(b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\n" + fields + b"\r\n" + body)
        await reading
        head, _, said = bytes(client.said).partition(b"\r\n\r\n")
        if b" 200 " not in head[:20] or b"chunked" in head or not said.endswith(b"data: [DONE]\n\n"):
            findings.problems.append(f"old: {bytes(client.said)!r}")


KINDS: Final[tuple[Kind, ...]] = (
    well_formed, well_formed, well_formed, malformed, malformed, endless, never_reading, slow, leaving, idle, old,
)  # fmt: skip


async def attack(port: int, seed: int, findings: Findings) -> None:
    """One client of this seed."""
    maker = Maker(seed)
    kind = maker.random.choice(KINDS)
    name = kind.__name__  # type: ignore[attr-defined]
    findings.kinds[name] = findings.kinds.get(name, 0) + 1
    try:
        async with asyncio.timeout(patient(DEADLINE_S)):
            await kind(port, maker, findings)
    except TimeoutError:
        findings.problems.append(f"{name}, seed {seed}: neither answered nor closed in {patient(DEADLINE_S):g} s")
    except ConnectionError:
        # It was idle for longest, or there was no room for it.
        pass
