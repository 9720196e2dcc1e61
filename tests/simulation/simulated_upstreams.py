"""OpenAI-compatible server to which requests fall back. It is slow, refuses, breaks off, and answers nonsense."""

import asyncio
import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx2

from gateway.config.settings import UpstreamConfig
from tests.simulation.simulated_worker import PROMPT_TOKENS, STEP_S, answer_ids, text_of
from tests.simulation.world import World

MODEL = "u"
NAME = "cloud"
# Waits of the gateway for the first byte, and for the next one.
PATIENCE_S = 5.0
# A stream without an end breaks off after this time.
ENDLESS_S = 120.0


def upstream_config(models: list[str]) -> UpstreamConfig:
    """Return the configuration of the upstream. It has a model of its own, and those of the gateway."""
    return UpstreamConfig(
        name=NAME,
        url=f"http://{NAME}/v1",
        models={name: f"far-{name}" for name in (MODEL, *models)},
        plain_http=True,
    )


class Pieces(httpx2.AsyncByteStream):
    """Body of an answer that is sent at once."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


class SimulatedUpstreams(httpx2.AsyncBaseTransport):
    """Connections to the upstream, from any gateway of the world."""

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random
        # Number of times that a gateway has closed its connections.
        self.closed = 0
        self._storm = random.choice((0.0, 0.3, 1.0, 3.0))

    def happens(self, fault: str, probability: float) -> bool:
        """Draw whether a fault happens now. None happens once the world is calm."""
        happens = not self.world.is_calm and self.random.random() < probability * self._storm
        if happens:
            self.world.note(f"upstream: {fault}")
        return happens

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        body: dict[str, Any] = json.loads(await request.aread())
        closed = self.closed
        await asyncio.sleep(self.random.random() * 0.05)
        if self.happens("refuses a connection", 0.05):
            raise httpx2.ConnectError("refused")
        if self.happens("is slow", 0.05):
            await asyncio.sleep(PATIENCE_S * 2 * self.random.random())
        if self.happens("refuses", 0.1):
            return self._refusal()
        if self.happens("answers nonsense", 0.05):
            return self._nonsense()
        name, prompt = body["model"].removeprefix("far-"), str(body["messages"][-1]["content"])
        ids = answer_ids(name, prompt)
        limit = min(len(ids), body.get("max_tokens") or len(ids))
        answer = UpstreamAnswer(self, ids[:limit], "stop" if limit == len(ids) else "length", closed)
        if body.get("stream"):
            return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=answer)
        return _response(200, json.dumps(answer.whole()))

    async def aclose(self) -> None:
        self.closed += 1

    def _refusal(self) -> httpx2.Response:
        status = self.random.choice((400, 401, 403, 404, 429, 429, 500, 502, 503, 529))
        headers = {"retry-after": "7"} if status == 429 else {}
        if self.random.random() < 0.3:
            return _response(status, "<h1>Bad gateway</h1>", "text/html", headers)
        error = {"message": "not now", "type": "server_error", "code": "upstream_busy"}
        return _response(status, json.dumps({"error": error}), headers=headers)

    def _nonsense(self) -> httpx2.Response:
        return self.random.choice(
            (
                _response(200, "<h1>Sign in</h1>", "text/html"),
                _response(302, "", headers={"location": "http://elsewhere/"}),
                _response(200, "\x1f\x8b", headers={"content-encoding": "gzip"}),
                _response(600, "{}"),
            )
        )


class UpstreamAnswer(httpx2.AsyncByteStream):
    """Stream of the model's answer, unless a fault ends it."""

    def __init__(self, upstreams: SimulatedUpstreams, ids: list[int], finish: str, closed: int) -> None:
        self._upstreams = upstreams
        self._ids = ids
        self._finish = finish
        self._closed = closed
        self._usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(ids), "total_tokens": 0}

    def whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": text_of(self._ids)}
        choice = {"index": 0, "message": message, "finish_reason": self._finish}
        return {"object": "chat.completion", "choices": [choice], "usage": self._usage}

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self._events():
            # Events come in arbitrary pieces.
            cut = self._upstreams.random.randint(0, len(event))
            for piece in (event[:cut], event[cut:]):
                if piece:
                    yield piece
                if self._upstreams.happens("breaks off", 0.01):
                    raise httpx2.ReadError("connection lost")

    async def _events(self) -> AsyncIterator[bytes]:
        upstreams, random, done = self._upstreams, self._upstreams.random, 0
        while done < len(self._ids):
            part = self._ids[done : done + random.choice((1, 1, 3))]
            done += len(part)
            await asyncio.sleep(STEP_S * (0.5 + random.random()))
            if upstreams.happens("falls silent", 0.005):
                await asyncio.sleep(PATIENCE_S)
                raise httpx2.ReadTimeout("silent")
            if upstreams.happens("does not end", 0.005):
                async for comment in self._comments():
                    yield comment
            yield _event({"choices": [{"index": 0, "delta": {"content": text_of(part)}, "finish_reason": None}]})
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": self._finish}]})
        if upstreams.happens("counts nonsense", 0.1):
            yield _event({"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": 1 << 70}}, ": ")
        yield _event({"choices": [], "usage": self._usage})
        yield b"data: [DONE]\n\n"

    async def _comments(self) -> AsyncIterator[bytes]:
        upstreams = self._upstreams
        end = upstreams.world.loop.time() + ENDLESS_S
        while upstreams.world.loop.time() < end and upstreams.closed == self._closed:
            await asyncio.sleep(2.0)
            yield b": still here\n\n"
        raise httpx2.ReadError("connection lost")


def _response(
    status: int, body: str, kind: str = "application/json", headers: dict[str, str] | None = None
) -> httpx2.Response:
    headers = {"content-type": kind, **(headers or {})}
    return httpx2.Response(status, headers=headers, stream=Pieces(body.encode()))


def _event(fields: dict[str, Any], prefix: str = "data: ") -> bytes:
    return f"{prefix}{json.dumps({'object': 'chat.completion.chunk', **fields})}\n\n".encode()
