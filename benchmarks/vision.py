"""Cost of images: encode, prefill and time to first token, cold, with features and with KV; streams beside encodes.

    python -m benchmarks.vision                      # demo-vision, on this machine; about two minutes
    python -m benchmarks.vision --mlx-vlm            # and mlx-vlm's own server on the same model

An image that was never seen is cold; the same image under other words before it has its features, and no KV beyond
them; the same request again has its KV. Images are drawn at random, so that no two are the same.
"""

import argparse
import asyncio
import base64
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from PIL import Image

from benchmarks import blas
from benchmarks.compare import machine

ROOT: Final = Path(__file__).parent.parent
MODEL: Final = "demo-vision"
START_S: Final = 300.0
# Tokens that each stream of text has before the images come.
SETTLE: Final = 30
QUESTION: Final = "What shape is in the picture?"


class Turn(msgspec.Struct, frozen=True):
    """Milliseconds to the first token, and tokens of the prompt that came from the cache."""

    ttft_ms: float
    cached: int


class Result(msgspec.Struct, frozen=True):
    """Medians, and the samples behind them."""

    cold_ms: float
    features_ms: float
    kv_ms: float
    encode_ms: float
    p99_ratio: float
    images_per_s: dict[str, float]
    is_same: bool
    samples: dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a folder, or a model that comes with mlxd")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--side", type=int, default=512, help="pixels of an image's side")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--mlx-vlm", action="store_true", help="measure mlx-vlm's server as well")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{machine()['cpu']} · BLAS: {blas.describe()}", flush=True)
    result = asyncio.run(_mlxd(args))
    print(f"\n{args.model}, images of {args.side} × {args.side}; ms to the first token, medians of {args.repeat}")
    print("| cold | features | KV | of it an encode | cold ÷ features | cold ÷ KV | p99 of streams beside ÷ alone |")
    print("|---|---|---|---|---|---|---|")
    print(
        f"| {result.cold_ms:.1f} | {result.features_ms:.1f} | {result.kv_ms:.1f} | {result.encode_ms:.1f} "
        f"| {result.cold_ms / result.features_ms:.2f} | {result.cold_ms / result.kv_ms:.2f} | {result.p99_ratio:.2f} |"
    )
    loads = {"mlxd": result.images_per_s}
    if args.mlx_vlm:
        loads["mlx_vlm.server"] = asyncio.run(_mlx_vlm(args))
    print("\nimages a second, each new, 8 tokens of answer")
    print("| server | 1 client | 8 clients |\n|---|---|---|")
    for name, found in loads.items():
        print(f"| {name} | {found['1']:.1f} | {found['8']:.1f} |")
    print(f"\nanswers of 8 at once equal to each alone: {'yes' if result.is_same else 'no'}")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine(), "mlxd": result} | loads)))


async def _mlxd(args: argparse.Namespace) -> Result:
    async with _served(args.model) as client:
        pictures = _Pictures(args.side)
        await _asked(client, pictures.new())  # loads the model, and warms it up
        cold: list[float] = []
        features: list[float] = []
        kv: list[float] = []
        before = await _encodes(client)
        for number in range(args.repeat):
            picture = pictures.new()
            first = await _asked(client, picture)
            other = await _asked(client, picture, f"Look at number {number}.")
            again = await _asked(client, picture)
            assert other.cached < again.cached, "the words before an image were to keep its KV from being used"
            cold.append(first.ttft_ms)
            features.append(other.ttft_ms)
            kv.append(again.ttft_ms)
        seconds, count = (after - at for after, at in zip(await _encodes(client), before, strict=True))
        assert count == args.repeat, f"{count} encodes of {args.repeat} images: features were not used again"
        alone, beside = await _beside(client, pictures)
        images = {str(clients): await _load(client, pictures, clients, args.seconds) for clients in (1, 8)}
        is_same = await _is_same(client, pictures)
    samples = {"cold": cold, "features": features, "kv": kv, "alone": alone, "beside": beside}
    ratio = _percentile(beside, 99) / _percentile(alone, 99)
    return Result(
        cold_ms=_percentile(cold, 50),
        features_ms=_percentile(features, 50),
        kv_ms=_percentile(kv, 50),
        encode_ms=1000 * seconds / count,
        p99_ratio=ratio,
        images_per_s=images,
        is_same=is_same,
        samples=samples,
    )


async def _mlx_vlm(args: argparse.Namespace) -> dict[str, float]:
    """Its server on the same folder; what it needs beside mlx-vlm must be installed."""
    folder = ROOT / "worker" / "demo_vision" if args.model == MODEL else Path(args.model)
    port = _free_port()
    command = [sys.executable, "-m", "mlx_vlm.server", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        env = blas.environment()
        process = await asyncio.to_thread(subprocess.Popen, command, env=env, stdout=log, stderr=log)
        try:
            async with _client(port) as client:
                await _until_up(client, process, "/health")
                pictures = _Pictures(args.side)
                return {str(n): await _load(client, pictures, n, args.seconds, str(folder)) for n in (1, 8)}
        finally:
            process.terminate()
            process.wait(30)


# -- the servers -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _served(model: str) -> AsyncGenerator[httpx.AsyncClient, None]:
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="mlxd-") as home:
        config = f'[server]\nport = {port}\n[models."{MODEL}"]\npath = "{model}"\nbatching = "together"\n'
        await asyncio.to_thread(Path(home, "mlxd.toml").write_text, config)
        command = [sys.executable, "-m", "gateway.main"]
        with tempfile.TemporaryFile() as log:
            env = blas.environment() | {"MLXD_HOME": home}
            process = await asyncio.to_thread(subprocess.Popen, command, env=env, stdout=log, stderr=log, cwd=ROOT)
            try:
                async with _client(port) as client:
                    await _until_up(client, process, "/livez")
                    yield client
            finally:
                process.terminate()
                process.wait(60)


def _client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=START_S, trust_env=False)


async def _until_up(client: httpx.AsyncClient, process: "subprocess.Popen[bytes]", path: str) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        try:
            if (await client.get(path)).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.1)
    raise SystemExit("the server did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _encodes(client: httpx.AsyncClient) -> tuple[float, float]:
    """Seconds in towers, and media encoded, so far."""
    text = (await client.get("/metrics")).text
    names = ("mlxd_media_encode_seconds_total", "mlxd_media_encoded_total")
    rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(names)]
    seconds, count = (sum(float(value) for name, _, value in rows if name.startswith(wanted)) for wanted in names)
    return seconds, count


# -- requests --------------------------------------------------------------------------------------------------------


class _Pictures:
    """Images of random colours, PNG in base64; never the same twice."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._chance = random.Random(1)

    def new(self) -> str:
        blocks = Image.frombytes("RGB", (8, 8), self._chance.randbytes(192))
        file = BytesIO()
        blocks.resize((self._side, self._side), Image.Resampling.NEAREST).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _body(picture: str, before: str = "", tokens: int = 8, model: str = MODEL) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    parts += [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": parts}]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}


async def _asked(client: httpx.AsyncClient, picture: str, before: str = "") -> Turn:
    body = _body(picture, before) | {"stream": True, "stream_options": {"include_usage": True}}
    began, first, cached = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            if not first and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = time.perf_counter()
    return Turn((first - began) * 1000, cached)


async def _beside(client: httpx.AsyncClient, pictures: _Pictures) -> tuple[list[float], list[float]]:
    """Gaps between tokens of eight streams of text: alone, and while four requests with new images are answered."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "stream": True}
    # With log-probabilities there is a chunk for each token, also for one that has no text.
    body |= {"max_tokens": 10 * SETTLE, "ignore_eos": True, "logprobs": True}
    times: list[list[float]] = [[] for _ in range(8)]

    async def stream(own: list[float]) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    own.append(time.perf_counter())  # noqa: PERF401 (as they come)

    async with asyncio.TaskGroup() as tasks:
        for own in times:
            tasks.create_task(stream(own))
        async with asyncio.timeout(START_S):
            while min(map(len, times)) < SETTLE:  # noqa: ASYNC110 - of streams, which tell nothing else
                await asyncio.sleep(0.005)
        began = time.perf_counter()
        await asyncio.gather(*(_asked(client, pictures.new()) for _ in range(4)))
        ended = time.perf_counter()
    gaps = [(a, b) for own in times for a, b in pairwise(own[4:])]
    alone = [(b - a) * 1000 for a, b in gaps if b < began or a > ended]
    return alone, [(b - a) * 1000 for a, b in gaps if b > began and a < ended]


async def _load(
    client: httpx.AsyncClient, pictures: _Pictures, clients: int, seconds: float, model: str = MODEL
) -> float:
    """Images a second, each new, by so many clients for so long."""
    await client.post("/v1/chat/completions", json=_body(pictures.new(), model=model))
    began = time.perf_counter()
    done = 0

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            reply = await client.post("/v1/chat/completions", json=_body(pictures.new(), model=model))
            if reply.status_code != 200:
                raise SystemExit(f"a request failed: {reply.status_code} {reply.text[:300]}")
            done += 1

    await asyncio.gather(*(ask() for _ in range(clients)))
    return done / (time.perf_counter() - began)


async def _is_same(client: httpx.AsyncClient, pictures: _Pictures) -> bool:
    """Whether eight answers at once are those of each alone, in three rounds."""

    async def answer(body: dict[str, Any]) -> str:
        return (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]

    for _ in range(3):
        bodies = [_body(pictures.new(), tokens=24) for _ in range(8)]
        together = await asyncio.gather(*map(answer, bodies))
        if together != [await answer(body) for body in bodies]:
            return False
    return True


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


if __name__ == "__main__":
    main()
