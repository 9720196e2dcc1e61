"""A peer that lies: what it sends costs neither memory, nor other requests, nor the budget of a key."""

import asyncio
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.config.settings import PeerConfig
from gateway.peers.node import REFUSAL_BYTES_MAX, Declined, Node
from protocol.messages import Ready
from protocol.peering import PeerModel, PeerRequest
from tests.gateway.peers.scripted import MODEL, Scripted

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Alone:
    """A node of a scripted peer, without a gateway."""

    node: Node
    server: asyncio.Server

    async def close(self) -> None:
        await self.node.close()
        self.server.close()


async def alone(scripted: Scripted, path: Path) -> Alone:
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    key_file = path / "b.key"
    key_file.write_text("secret\n")
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    return Alone(Node(PeerConfig(name="b", url=url, key_file=str(key_file)), 1), server)


async def nothing(_: PeerRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n")


async def test_a_refusal_is_not_unpacked_and_only_its_beginning_is_read(tmp_path: Path) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(16)) + packer.flush()
    assert len(bomb) > 2 * REFUSAL_BYTES_MAX

    async def refuse(_: PeerRequest, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 500 X\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(bomb) + bomb)

    peer = await alone(Scripted(refuse), tmp_path)
    try:
        with pytest.raises(Declined) as refused:
            async with peer.node.generate(b"\x93\xa1m\x90\xc0", {}):
                pass
        assert refused.value.args[0].startswith("HTTP 500: \x1f")
    finally:
        await peer.close()


READY = Ready(-1, "", 1000, 4, 100, 1, 1.0)


@pytest.mark.parametrize(
    "bad",
    [
        replace(MODEL, wait_s=float("nan")),
        replace(MODEL, load_s=float("inf")),
        replace(MODEL, prefill_rate=-1.0),
        replace(MODEL, context=-1),
        replace(MODEL, slots=1 << 60),
        replace(MODEL, sampling={"temperature": float("nan")}),
        replace(MODEL, ready=replace(READY, weights_bytes=-1)),
    ],
)
async def test_a_status_with_a_number_that_cannot_be_is_refused(tmp_path: Path, bad: PeerModel) -> None:
    scripted = Scripted(nothing, models=[replace(MODEL, ready=READY)])
    peer = await alone(scripted, tmp_path)
    try:
        await peer.node.poll()
        assert peer.node.problem == ""
        scripted.models = [bad]
        await peer.node.poll()
        assert "not understood" in peer.node.problem
    finally:
        await peer.close()
