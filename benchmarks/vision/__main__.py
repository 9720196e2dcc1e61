"""Cost of images: time to first token cold, with features and with KV; streams beside encodes; images a second.

    python -m benchmarks.vision                      # demo-vision, on this machine; about two minutes
    python -m benchmarks.vision --mlx-vlm            # and mlx-vlm's own server on the same model
    python -m benchmarks.vision inside               # a feature hit, and text requests beside the same text model
    python -m benchmarks.vision --geometry qwen3-vl-8b --mlx-vlm --side 1024 --repeat 7 --seconds 8       # on a GPU

An image that was never seen is cold; the same image under other words before it has its features, and no KV beyond
them; the same request again has its KV. Images are drawn at random, so that no two are the same.
"""

import argparse
import asyncio
import base64
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
from PIL import Image

from benchmarks import blas
from benchmarks.compare import machine
from benchmarks.vision import geometries, inside
from benchmarks.vision.servers import START_S, Server, Unavailable, mlx_vlm, mlxd
from gateway.ctl.bench.closed_loop import table

DEMO: Final = "demo-vision"
STREAMS: Final = 8
IMAGES_BESIDE: Final = 4
# Number of tokens that each text stream gets before the images arrive, and in all.
SETTLE: Final = 30
TEXT_TOKENS: Final = 300
ROUNDS: Final = 6
QUESTION: Final = "What shape is in the picture?"


class Turn(msgspec.Struct, frozen=True):
    """One request: milliseconds to the first token, tokens of the prompt, and how many of them came from the cache."""

    ttft_ms: float
    prompt: int
    cached: int


class Result(msgspec.Struct, frozen=True):
    """Medians of one server, and the samples behind them. `equal` are rounds of eight whose answers are those alone.

    `encode_ms` is None where the server does not tell; the ratio of streams, where the model ends them at once.
    """

    server: str
    prompt: int
    cold_ms: float
    features_ms: float
    kv_ms: float
    encode_ms: float | None
    p99_ratio: float | None
    p99_ms: float | None
    images_per_s: dict[str, float]
    equal: int
    samples: dict[str, list[float]]


def main() -> None:
    args = _arguments()
    if blas.has_openblas() and "LD_PRELOAD" not in os.environ and args.what == "inside":
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.vision", *sys.argv[1:]], blas.environment())
    print(f"{machine()['cpu']} · BLAS: {blas.describe()} · load average {os.getloadavg()[0]:.1f}", flush=True)
    if args.what == "inside":
        print(inside.report(args.repeat, args.side))
        return
    folder = str(geometries.build(args.geometry, args.dtype)) if args.geometry else args.model
    results = [asyncio.run(_measured(args, folder, is_own)) for is_own in ((True, False) if args.mlx_vlm else (True,))]
    print(_report(args, [result for result in results if result is not None]))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine(), "servers": results})))


def _report(args: argparse.Namespace, results: Sequence[Result]) -> str:
    header = ["server", "prompt", "cold", "features", "again", "of it encode", "p99 beside", "÷ alone",
              "images/s 1", "images/s 8", "as alone"]  # fmt: skip
    rows = [
        [
            one.server, str(one.prompt), f"{one.cold_ms:.1f}", f"{one.features_ms:.1f}", f"{one.kv_ms:.1f}",
            _shown(one.encode_ms, ".1f"), _shown(one.p99_ms, ".1f"), _shown(one.p99_ratio, ".2f"),
            f"{one.images_per_s['1']:.2f}", f"{one.images_per_s['8']:.2f}", f"{one.equal} of {ROUNDS}",
        ]
        for one in results
    ]  # fmt: skip
    title = f"{args.geometry or args.model}, images of {args.side} × {args.side}; ms to the first token, medians of "
    return f"\n{title}{args.repeat}\n{table(header, rows)}"


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


async def _measured(args: argparse.Namespace, folder: str, is_own: bool) -> Result | None:
    """Measure one server; return None, after a message, if it cannot run here."""
    demo = str(blas.ROOT / "worker" / "demo_vision")
    opened = mlxd(folder) if is_own else mlx_vlm(demo if folder == DEMO else folder)
    began = time.monotonic()
    try:
        async with opened as server:
            result = await _measure(server, args)
    except Unavailable as why:
        print(why, file=sys.stderr)
        return None
    print(f"  {result.server}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return result


async def _measure(server: Server, args: argparse.Namespace) -> Result:
    pictures = _Pictures(args.side)
    for _ in range(2):
        await _asked(server, pictures.new())  # this request loads the model and warms it up
    before = await server.encodes()
    turns: list[tuple[Turn, Turn, Turn]] = []
    for number in range(args.repeat):
        picture = pictures.new()
        first, other = await _asked(server, picture), await _asked(server, picture, f"Look at number {number}.")
        turns.append((first, other, await _asked(server, picture)))
    after = await server.encodes()
    encode_ms = None
    if before is not None and after is not None:
        assert after[1] - before[1] == args.repeat, "features were not used again"
        assert all(other.cached < again.cached for _, other, again in turns), (
            "the words did not keep KV from being used"
        )
        encode_ms = 1000 * (after[0] - before[0]) / args.repeat
    cold, features, kv = ([turn[at].ttft_ms for turn in turns] for at in range(3))
    alone, beside = await _beside(server, pictures)
    images = {str(clients): await _load(server, pictures, clients, args.seconds) for clients in (1, 8)}
    return Result(
        server=server.name,
        prompt=turns[0][0].prompt,
        cold_ms=statistics.median(cold),
        features_ms=statistics.median(features),
        kv_ms=statistics.median(kv),
        encode_ms=encode_ms,
        p99_ratio=_percentile(beside, 99) / _percentile(alone, 99) if beside and alone else None,
        p99_ms=_percentile(beside, 99) if beside else None,
        images_per_s=images,
        equal=await _equal_rounds(server, pictures),
        samples={"cold": cold, "features": features, "kv": kv, "alone": alone, "beside": beside},
    )


class _Pictures:
    """Source of images of random colours, PNG in base64; no two are the same."""

    def __init__(self, side: int) -> None:
        self._side = side
        self._chance = random.Random(1)

    def new(self) -> str:
        blocks = Image.frombytes("RGB", (8, 8), self._chance.randbytes(192))
        file = BytesIO()
        blocks.resize((self._side, self._side), Image.Resampling.NEAREST).save(file, "PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _body(server: Server, picture: str, before: str = "", tokens: int = 8) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    parts += [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": parts}]
    return {"model": server.model, "messages": messages, "max_tokens": tokens, "temperature": 0}


async def _asked(server: Server, picture: str, before: str = "") -> Turn:
    body = _body(server, picture, before) | {"stream": True, "stream_options": {"include_usage": True}}
    began, first, prompt, cached = time.perf_counter(), 0.0, 0, 0
    async with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{server.name}: a request failed: {reply.status_code} {(await reply.aread())[:300]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            if usage := chunk.get("usage"):
                prompt, cached = usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {})["cached_tokens"]
            if not first and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = time.perf_counter()
    return Turn((first - began) * 1000, prompt, cached)


async def _beside(server: Server, pictures: _Pictures) -> tuple[list[float], list[float]]:
    """Return the milliseconds between tokens of text streams: alone, and while requests with new images are answered.

    Both lists are empty if the model ends its text before the images arrive, which mlx-vlm's server allows.
    """
    body = {"model": server.model, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
    # A request for log-probabilities gets a chunk for each token, including tokens without text.
    body |= {"max_tokens": TEXT_TOKENS, "ignore_eos": True, "logprobs": True, "stream": True}
    times: list[list[float]] = [[] for _ in range(STREAMS)]

    async def stream(own: list[float]) -> None:
        async with server.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    own.append(time.perf_counter())  # noqa: PERF401 (as they come)

    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(own)) for own in times]
        async with asyncio.timeout(START_S):
            while min(map(len, times)) < SETTLE and not any(task.done() for task in streams):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        if any(task.done() for task in streams):
            return [], []
        began = time.perf_counter()
        await asyncio.gather(*(_asked(server, pictures.new()) for _ in range(IMAGES_BESIDE)))
        ended = time.perf_counter()
    gaps = [(a, b) for own in times for a, b in pairwise(own[4:])]
    alone = [(b - a) * 1000 for a, b in gaps if b < began or a > ended]
    return alone, [(b - a) * 1000 for a, b in gaps if b > began and a < ended]


async def _load(server: Server, pictures: _Pictures, clients: int, seconds: float) -> float:
    """Return images per second: each client sends new images for `seconds`."""
    began = time.perf_counter()
    done = 0

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await _answer(server, _body(server, pictures.new()))
            done += 1

    await asyncio.gather(*(ask() for _ in range(clients)))
    return done / (time.perf_counter() - began)


async def _equal_rounds(server: Server, pictures: _Pictures) -> int:
    """Count the rounds in which eight answers at once equal those of each request alone."""
    equal = 0
    for _ in range(ROUNDS):
        bodies = [_body(server, pictures.new(), tokens=24) for _ in range(8)]
        together = await asyncio.gather(*(_answer(server, body) for body in bodies))
        equal += together == [await _answer(server, body) for body in bodies]
    return equal


async def _answer(server: Server, body: dict[str, Any]) -> str:
    reply = await server.client.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        raise SystemExit(f"{server.name}: a request failed: {reply.status_code} {reply.text[:300]}")
    return reply.json()["choices"][0]["message"]["content"]


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="servers", choices=("servers", "inside"))
    parser.add_argument("--model", default=DEMO, help="a folder, or a model that comes with mlxd")
    parser.add_argument("--geometry", choices=sorted(geometries.GEOMETRIES), help="a model of random weights instead")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of the random weights")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--side", type=int, default=512, help="pixels of an image's side")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--mlx-vlm", action="store_true", help="measure mlx-vlm's server as well")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
