import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.config.settings import Config, ServerConfig
from gateway.http import connection_limits
from gateway.http.connection_limits import (
    CLIENTS_MIN,
    RESERVED_FILES,
    TooFewFiles,
    public_connections,
    room_for_clients,
)
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import Exposition
from tests.gateway.harness import DEADLINE_S, Gateway, chat, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

LIVEZ = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
LONG = json.dumps(chat(stream=True, max_tokens=1_000_000)).encode()
STREAM = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(LONG), LONG)


class Peer:
    """A client's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, request: bytes = LIVEZ) -> bytes:
        """The status line, or nothing from a connection that was closed."""
        self.writer.write(request)
        async with asyncio.timeout(patient(DEADLINE_S)):
            try:
                line = await self.reader.readline()
                if request is LIVEZ and b" 200 " in line:
                    head = await self.reader.readuntil(b"\r\n\r\n")
                    await self.reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
            except ConnectionError:
                return b""
        return line

    async def is_closed(self) -> bool:
        """Wait until it is."""
        async with asyncio.timeout(patient(DEADLINE_S)):
            return await self.reader.read(-1) == b""


@asynccontextmanager
async def peers(gateway: Gateway, count: int, address: str = "127.0.0.1") -> AsyncGenerator[list[Peer], None]:
    """So many connections, the first one first."""
    found: list[Peer] = []
    try:
        while len(found) < count:
            found.append(Peer(*await asyncio.open_connection("127.0.0.1", gateway.port, local_addr=(address, 0))))
        yield found
    finally:
        for peer in found:
            peer.writer.close()


async def test_the_longest_idle_connection_gives_way_to_a_new_one(tmp_path: Path) -> None:
    async with (
        running(tmp_path, connections_max=3, address_part=1) as gateway,
        peers(gateway, 3) as (first, second, third),
    ):
        # It is idle from now on, and not from when it connected.
        assert b" 200 " in await first.ask()
        async with peers(gateway, 1) as (fourth,):
            assert b" 200 " in await fourth.ask()
            assert await second.is_closed()
            assert b" 200 " in await first.ask()
            assert b" 200 " in await third.ask()
        assert gateway.metrics.connections_dropped == {"idle": 1}
        assert not gateway.metrics.connections_refused


async def test_a_connection_with_a_request_never_gives_way_and_the_new_one_is_told(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "5"], connections_max=2, address_part=1) as gateway:
        async with peers(gateway, 2) as streams:
            for stream in streams:
                assert b" 200 " in await stream.ask(STREAM)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            async with asyncio.timeout(patient(DEADLINE_S)):
                said = await reader.read(-1)
            writer.close()
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in said
            assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
            assert gateway.metrics.connections["public"]() == 2
        await until(lambda: gateway.metrics.connections["public"]() == 0)
        async with peers(gateway, 1) as (again,):
            assert b" 200 " in await again.ask()
        assert gateway.metrics.connections_refused == {("public", "address"): 1}
        text = Exposition(gateway.metrics).text().decode()
        assert 'mlxd_connections_max{listener="public"} 2.0' in text
        assert 'mlxd_connections_refused_total{listener="public",reason="address"} 1.0' in text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
async def test_one_address_that_has_all_that_it_may_have_takes_nothing_from_another(tmp_path: Path) -> None:
    async with (
        running(tmp_path, ["--step-ms", "5"], connections_max=10, address_part=0.2) as gateway,
        peers(gateway, 1, "127.0.0.3") as (other,),
        peers(gateway, 2, "127.0.0.2") as (first, second),
    ):
        assert b" 200 " in await first.ask(STREAM)
        assert b" 200 " in await other.ask()
        async with peers(gateway, 1, "127.0.0.2") as (third,), peers(gateway, 1, "127.0.0.3") as (another,):
            # Of its own, the idle one gave way.
            assert b" 200 " in await third.ask(STREAM)
            assert await second.is_closed()
            assert b" 200 " in await another.ask()
            assert b" 200 " in await other.ask()
            assert gateway.metrics.connections["public"]() == 4


async def test_a_client_that_takes_its_answer_very_slowly_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", patient(2))
    async with running(tmp_path, connections_max=1, address_part=1) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            await loop.sock_sendall(client, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100)
            line = b""
            async with asyncio.timeout(patient(DEADLINE_S)):
                while b" 200 " not in line:
                    # Never so slowly that it would be cut off for that.
                    await loop.sock_recv(client, 1500)
                    async with peers(gateway, 1) as (other,):
                        line = await other.ask()
                    await asyncio.sleep(0.02)
        assert gateway.metrics.connections_dropped == {"idle": 1}


class Idle:
    """A connection of which only matters that it gave way."""

    def __init__(self) -> None:
        self.gave_way = False

    def abort(self) -> None:
        self.gave_way = True

    def check_stalled(self) -> None: ...


def live(**server: object) -> LiveConfig:
    return LiveConfig(Config(Path("/nowhere"), ServerConfig(**server), {}, Path("/nowhere/mlxd.toml")))  # type: ignore[arg-type]


async def test_two_reasons_to_drop_a_connection_drop_and_count_it_once() -> None:
    metrics = Metrics()
    connections = public_connections(live(), metrics, 4096)
    connection = Idle()
    assert connections.admit(connection, "192.0.2.1")
    for reason in ("write_timeout", "late_body"):
        connections.drop(connection, reason)

    assert connection.gave_way
    assert metrics.connections_dropped == {"write_timeout": 1}
    assert metrics.connections["public"]() == 0


async def test_all_addresses_of_a_machine_with_ipv6_are_one() -> None:
    connections = public_connections(live(), Metrics(), 4096, connections_max=4)
    mine = [Idle() for _ in range(3)]
    for number, connection in enumerate(mine):
        assert connections.admit(connection, f"2001:db8:1:2::{number}")
    assert [connection.gave_way for connection in mine] == [True, False, False]
    assert connections.admit(Idle(), "2001:db8:1:3::1")
    assert not mine[1].gave_way
    for connection in mine:
        connections.remove(connection)


async def test_a_trusted_proxy_may_have_as_many_as_all() -> None:
    server = live(trusted_proxies=("10.0.0.0/8",))
    connections = public_connections(server, Metrics(), 4096, connections_max=4)
    proxied = [Idle() for _ in range(5)]
    for connection in proxied:
        assert connections.admit(connection, "10.1.2.3")
    assert [connection.gave_way for connection in proxied] == [True, False, False, False, False]
    for connection in proxied:
        connections.remove(connection)


@pytest.mark.parametrize("files", [256, 1024, 4096, 65536])
@pytest.mark.parametrize("models", [0, 2, 500])
def test_a_reserve_is_left_whatever_the_limit_of_open_files(files: int, models: int) -> None:
    room = room_for_clients(files, models)
    assert files - room >= RESERVED_FILES
    assert room <= files * 15 / 16
    if models <= 2:
        assert room >= CLIENTS_MIN


def test_a_limit_that_leaves_too_few_for_clients_is_a_plain_sentence() -> None:
    with pytest.raises(TooFewFiles, match=r"at most 128 files may be open.*ulimit -n 4096"):
        public_connections(live(), Metrics(), 128)


def test_connections_are_as_many_as_the_open_files_beyond_the_reserve() -> None:
    metrics = Metrics()
    public_connections(live(), metrics, 4096)
    assert metrics.connections_max["public"]() == 3840
