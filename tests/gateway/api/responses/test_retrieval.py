"""Retrieval of large responses: memory and room of clients that read them, or do not."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from gateway.access.key import Key, KeyFile
from gateway.config.settings import ServerConfig
from gateway.http import connection, connection_limits
from gateway.http.bodies import READER_BYTES
from gateway.request import body_memory
from tests.gateway.harness import DEADLINE_S, Gateway, running, until

pytestmark = pytest.mark.anyio

PATH: Final = "/v1/responses"
MIB: Final = 1024 * 1024
# More than the system's buffers take of an answer whose client does not read.
LARGE_BYTES: Final = 8 * MIB
READERS: Final = 30
SMALL_BUFFER: Final = 4096
# Room for two such answers.
SERVER: Final = ServerConfig(max_body_bytes=9 * MIB)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory for bodies, and much time for clients that do not read."""
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 20 * MIB)
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", 600.0)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("g"), server=SERVER) as running_gateway:
        yield running_gateway


@asynccontextmanager
async def ended(gateway: Gateway, headers: dict[str, str] | None = None, /, **fields: Any) -> AsyncGenerator[str, None]:
    """The id of a background response that has ended."""
    body = {"model": "m", "input": "hi", "max_output_tokens": 3, "background": True} | fields
    made = (await gateway.client.post(PATH, json=body, headers=headers)).json()
    await until(lambda: not gateway.app.services.bodies.numbers.used_bytes)
    yield made["id"]
    await gateway.client.delete(f"{PATH}/{made['id']}", headers=headers)


@asynccontextmanager
async def unread(
    gateway: Gateway, path: str, headers: dict[str, str] | None = None
) -> AsyncGenerator[socket.socket, None]:
    """A client that does not read its answer, which has begun."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        client.connect(("127.0.0.1", gateway.port))
        client.setblocking(False)
        fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n".encode())
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.get_running_loop().sock_recv(client, 12) == b"HTTP/1.1 200"
        yield client


def used_bytes(gateway: Gateway) -> int:
    return gateway.app.services.bodies.numbers.used_bytes


@pytest.mark.parametrize("query", ["", "?stream=true", "/input_items"])
async def test_clients_that_do_not_read_a_large_response_share_one_copy_of_it(gateway: Gateway, query: str) -> None:
    words = "x" * LARGE_BYTES
    fields = {"input": words} if query == "/input_items" else {"instructions": words}
    process = psutil.Process()
    async with ended(gateway, **fields) as made, AsyncExitStack() as clients:
        # The first one pays for what the process keeps of memory that was used once.
        assert len((await gateway.client.get(f"{PATH}/{made}{query}")).content) > LARGE_BYTES
        before = process.memory_info().rss
        for _ in range(READERS):
            await clients.enter_async_context(unread(gateway, f"{PATH}/{made}{query}"))

        assert process.memory_info().rss - before < READERS * LARGE_BYTES / 4
        assert LARGE_BYTES < used_bytes(gateway) <= LARGE_BYTES + MIB + READERS * READER_BYTES
        await clients.aclose()
        await until(lambda: not used_bytes(gateway))


async def test_a_key_whose_answers_are_not_read_is_refused_more_of_them_and_no_other_key_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.01)
    keys = KeyFile(tmp_path / "keys/keys.json")
    ana, bo = ({"authorization": f"Bearer {keys.create(_key(name))[1]}"} for name in ("ana", "bo"))
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 40 * MIB)
    async with running(tmp_path, server=SERVER) as gateway, AsyncExitStack() as held:
        get = gateway.client.get
        words = "x" * LARGE_BYTES
        of_bo, *of_ana = [
            await held.enter_async_context(ended(gateway, headers, instructions=words))
            for headers in (bo, ana, ana, ana)
        ]
        clients = await held.enter_async_context(AsyncExitStack())
        for response_id, query in zip(of_ana, ("", "?stream=true"), strict=False):
            await clients.enter_async_context(unread(gateway, f"{PATH}/{response_id}{query}", ana))

        for query in ("", "?stream=true"):
            refused = await get(f"{PATH}/{of_ana[2]}{query}", headers=ana)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_memory_full")
            assert "key's" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"]
        refused = await get(f"{PATH}/{of_ana[2]}", headers={"anthropic-version": "2023-06-01"} | ana)
        assert (refused.status_code, refused.json()["type"]) == (503, "error")
        # One more client of an answer that is being read needs room for its slices only.
        assert (await get(f"{PATH}/{of_ana[0]}", headers=ana)).status_code == 200
        assert (await get(f"{PATH}/{of_bo}", headers=bo)).status_code == 200

        await clients.aclose()
        await until(lambda: not used_bytes(gateway))
        assert (await get(f"{PATH}/{of_ana[2]}", headers=ana)).status_code == 200


def _key(name: str) -> Key:
    return Key(name=name, prefix="", salt="", hash="")


async def test_a_background_response_whose_first_answer_has_no_room_is_not_begun(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.01)
    services = gateway.app.services
    body = {"model": "m", "input": "hi", "max_output_tokens": 100_000, "background": True}
    for is_stream in (False, True):
        with closing(services.bodies.lease()) as lease:
            await lease.reach(6 * MIB)
            asked = body | {"instructions": "x" * LARGE_BYTES, "stream": is_stream}
            refused = await gateway.client.post(PATH, json=asked)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "body_memory_full")
            await until(lambda: used_bytes(gateway) == 6 * MIB)
            assert services.admission.inside("m") == 0


async def test_a_client_that_closed_its_half_gets_nothing_within_an_event(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at by comments, and events of several pieces are no place for them."""
    monkeypatch.setattr(connection, "PROBES_S", (0.0005,))
    async with (
        ended(gateway, instructions="x" * LARGE_BYTES) as made,
        unread(gateway, f"{PATH}/{made}?stream=true") as client,
    ):
        client.shutdown(socket.SHUT_WR)
        reader, writer = await asyncio.open_connection(sock=client)
        async with asyncio.timeout(DEADLINE_S):
            said = await reader.read()
        writer.close()

    text = _unchunked(said.partition(b"\r\n\r\n")[2]).decode()
    told = [json.loads(block.partition("\ndata: ")[2]) for block in text.split("\n\n") if block.startswith("event")]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert told[-1]["type"] == "response.incomplete"


def _unchunked(data: bytes) -> bytes:
    pieces: list[bytes] = []
    while data:
        size, _, data = data.partition(b"\r\n")
        pieces.append(data[: int(size, 16)])
        data = data[int(size, 16) + 2 :]
    return b"".join(pieces)


async def test_arguments_that_are_an_object_are_listed_as_their_text(gateway: Gateway) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"city": "Bern"}}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    made = (
        await gateway.client.post(PATH, json={"model": "m", "input": [call, result], "max_output_tokens": 3})
    ).json()
    page = (await gateway.client.get(f"{PATH}/{made['id']}/input_items", params={"order": "asc"})).json()

    assert page["data"][0]["arguments"] == '{"city":"Bern"}'
