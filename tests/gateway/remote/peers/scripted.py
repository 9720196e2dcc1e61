"""Peer that answers by a script of its test: a daemon that lies, or is none of ours."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.config.remote_settings import PeerConfig
from gateway.config.settings import ModelConfig
from protocol.minors import MAJOR, MINOR
from protocol.peering import (
    STATUS_PATH,
    PeerModel,
    PeerRequest,
    PeerStatus,
    PeerUp,
    decode_request,
    encode_status,
    frame,
)
from tests.gateway.harness import Gateway
from tests.gateway.remote.peers.pairs import door
from tests.support.pool import short_home

MODEL = PeerModel("m", form="f", state="ready", context=1000, slots=4, bound=8)
Answer = Callable[[PeerRequest, asyncio.StreamWriter], Awaitable[None]]


def answer(*messages: PeerUp) -> bytes:
    """An HTTP answer of frames."""
    body = b"".join(frame(message) for message in messages)
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@dataclass(slots=True)
class Scripted:
    """A server of HTTP/1.1 on the loopback with one model, `m`. Owned by one test."""

    answer: Answer
    models: Sequence[PeerModel] = (MODEL,)
    requests: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, after = head.partition(b"content-length:")
                body = await reader.readexactly(int(after.split(b"\r\n")[0])) if after else b""
                if STATUS_PATH.encode() in head:
                    status = encode_status(PeerStatus("bad", 123, "0", MAJOR, MINOR, False, list(self.models)))
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(status) + status)
                else:
                    self.requests += 1
                    await self.answer(decode_request(body), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def beside(scripted: Scripted, models: Sequence[ModelConfig] = ()) -> AsyncGenerator[Gateway]:
    """A gateway with this one peer, `b`, and models of its own."""
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with short_home() as home:
            key_file = home / "b.key"
            key_file.write_text("secret\n")
            async with door(
                home, PeerConfig(name="b", url=f"http://127.0.0.1:{port}", key_file=str(key_file)), models=models
            ) as gateway:
                yield gateway
    finally:
        server.close()
