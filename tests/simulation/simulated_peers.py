"""Two other daemons that serve one model. They speak the peer protocol, die, are slow, and send what is not true."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import httpx

from gateway.config.remote_settings import PeerConfig
from protocol import __version__
from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Delta, Finish, Ready, Rejected, Step, Tokenized, Usage
from protocol.minors import MAJOR, MINOR
from protocol.peering import (
    STATUS_PATH,
    PeerAlive,
    PeerModel,
    PeerStatus,
    decode_request,
    encode_status,
    frame,
)
from protocol.prompts import ChatPrompt
from protocol.to_worker import Generate
from tests.simulation.simulated_worker import PROMPT_TOKENS, STEP_S, Corrupt, answer_ids, text_of
from tests.simulation.world import World

MODEL = "p"
PEERS = ("east", "west")


def peer_configs(home: Path) -> dict[str, PeerConfig]:
    """Write the key for the peers, and return their configurations."""
    key_file = home / "peers.key"
    key_file.write_text("sk-mlxd-of-peers")
    return {
        name: PeerConfig(name=name, url=f"http://{name}", key_file=str(key_file), plain_http=True) for name in PEERS
    }


@dataclass(slots=True)
class Peer:
    """One peer. `storm` multiplies the probabilities of its faults."""

    name: str
    storm: float
    boot: int = 1_000_000
    down_until: float = 0.0


class SimulatedPeers(httpx.AsyncBaseTransport):
    """Connections to the peers, from any gateway of the world."""

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random
        self._peers = {name: Peer(name, random.choice((0.0, 0.3, 1.0, 3.0))) for name in PEERS}

    def happens(self, peer: Peer, fault: str, probability: float) -> bool:
        """Draw whether a fault of a peer happens now. None happens once the world is calm."""
        happens = not self.world.is_calm and self.random.random() < probability * peer.storm
        if happens:
            self.world.note(f"peer {peer.name}: {fault}")
        return happens

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        peer = self._peers[str(urlsplit(str(request.url)).hostname)]
        loop, timeouts = self.world.loop, request.extensions["timeout"]
        await asyncio.sleep(self.random.random() * 0.01)
        if self.happens(peer, "dies", 0.02):
            peer.down_until = loop.time() + self.random.random() * 20
            peer.boot += 1
        if loop.time() < peer.down_until:
            raise httpx.ConnectError("refused")
        if self.happens(peer, "is slow", 0.03):
            await asyncio.sleep(timeouts["read"])
            raise httpx.ReadTimeout("no answer")
        if request.url.path == STATUS_PATH:
            return httpx.Response(200, stream=Pieces(self._status(peer)))
        body = await request.aread()
        if self.happens(peer, "refuses", 0.05):
            return httpx.Response(self.random.choice((401, 404, 429, 500, 503)), stream=Pieces(b"refused"))
        asked = decode_request(body)
        if asked.call is not None:
            answer = Tokenized(asked.call.rid, PROMPT_TOKENS, tuple(range(PROMPT_TOKENS)))
            return httpx.Response(200, stream=Pieces(frame(answer)))
        return httpx.Response(200, stream=Answer(self, peer, asked.generates, timeouts["read"]))

    def _status(self, peer: Peer) -> bytes:
        form, models, boot = "f", [MODEL], peer.boot
        if self.happens(peer, "lists other models", 0.03):
            models = self.random.choice(([], ["ghost"], ["ghost", MODEL]))
        if self.happens(peer, "has another form", 0.02):
            form = "g"
        if self.happens(peer, "reports another boot", 0.03):
            boot = self.random.choice((0, 1, 2, peer.boot + 7))
        if self.happens(peer, "sends a broken status", 0.02):
            return self.random.choice((b"", b"\xc1", b"\x93\x25"))
        slots = -1 if self.happens(peer, "reports a negative number", 0.02) else 4
        ready = Ready(1, "", 1 << 20, 4, 4096, 1 << 30, 1.0)
        known = [PeerModel(name, (), form, "ready", ready, 4096, 0, slots, 100) for name in models]
        is_draining = self.happens(peer, "is draining", 0.03)
        return encode_status(PeerStatus(peer.name, boot, __version__, MAJOR, MINOR, is_draining, known))


class Pieces(httpx.AsyncByteStream):
    """Body of an answer that is sent at once."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


class Answer(httpx.AsyncByteStream):
    """Stream of frames: the rest of the model's answer to each sequence, unless a fault ends it."""

    def __init__(self, peers: SimulatedPeers, peer: Peer, asked: list[Generate], silence_s: float) -> None:
        self._peers = peers
        self._peer = peer
        self._asked = asked
        self._silence_s = silence_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for request in self._asked:
            async for data in self._sequence(request):
                # Frames come in arbitrary pieces.
                cut = self._peers.random.randint(0, len(data))
                yield data[:cut]
                yield data[cut:]

    async def _sequence(self, request: Generate) -> AsyncIterator[bytes]:
        peers, peer, random = self._peers, self._peer, self._peers.random
        assert isinstance(request.prompt, ChatPrompt)
        text = str(request.prompt.messages[-1]["content"])
        ids, rid = answer_ids(MODEL, text), request.rid
        done = len(request.resume)
        if list(request.resume) != ids[:done]:
            raise Corrupt(f"sequence {text!r} is resumed at a peer with {request.resume}, but its answer is {ids}")
        if peers.happens(peer, "rejects", 0.1):
            code = random.choice((Code.BUSY, Code.WORKER_DIED, Code.DRAINING, Code.OUT_OF_MEMORY))
            yield frame(Rejected(rid, Failure(code, "not here")))
            return
        tokens = PROMPT_TOKENS + (5 if peers.happens(peer, "counts another prompt", 0.02) else 0)
        yield frame(Accepted(rid, tokens))
        limit = min(len(ids), request.max_tokens or len(ids))
        number = 0
        while done < limit:
            await asyncio.sleep(STEP_S * (0.5 + random.random()))
            await self._misbehave()
            if peers.happens(peer, "sends nonsense", 0.03):
                yield random.choice(
                    (
                        frame(Step(0, 1, [Delta(rid ^ (1 << 40), text="ghost ")])),
                        frame(Step(-1, 1, [])),
                        frame(PeerAlive()),
                        b"\x00\x00\x00\x01\xc1",
                        b"\xff\xff\xff\xff",
                        frame(Step(0, 1, [Delta(rid, token_ids=(-1,))])),
                        frame(Step(0, 1, [Delta(rid, usage=Usage(-1, 0, 0))])),
                    )
                )
            part = ids[done : min(done + random.choice((1, 1, 3)), limit)]
            done += len(part)
            number += 1
            finish = None if done < limit else Finish.STOP if limit == len(ids) else Finish.LENGTH
            usage = Usage(PROMPT_TOKENS, 0, done) if finish is not None else None
            step = Step(0, number, [Delta(rid, text=text_of(part), token_ids=tuple(part), finish=finish, usage=usage)])
            yield frame(step)
            if finish is not None and peers.happens(peer, "repeats the end", 0.05):
                yield frame(step)

    async def _misbehave(self) -> None:
        peers, peer = self._peers, self._peer
        if peers.world.loop.time() < peer.down_until or peers.happens(peer, "is lost", 0.03):
            raise httpx.ReadError("connection lost")
        if peers.happens(peer, "falls silent", 0.01):
            await asyncio.sleep(self._silence_s)
            raise httpx.ReadTimeout("silent")
