"""The longest that the gateway's event loop stands still while large bodies of every kind arrive.

    python -m benchmarks.stall_bodies                  # 8 MiB of each kind, and 32 MiB of some
    python -m benchmarks.stall_bodies --kinds text,tools --repeat 5

The real gateway runs with a synthetic worker. A thread asks for `/livez` all the time, one request after the other: an
answer that is slower than without a body had to wait for the loop. The bodies are made before the time that counts.
"""

import argparse
import asyncio
import http.client
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.compare import machine
from benchmarks.gateway import PacedGateway
from gateway.ctl.bench.closed_loop import run, table

MIB: Final = 1 << 20
SETTLE_S: Final = 0.3
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"


class Stall(msgspec.Struct, frozen=True):
    """One kind of body. Times in ms: the slowest `/livez` while it was answered, and that answer itself.

    `least_ms` is that of the run that others disturbed least: a stall of the loop's own is there in every run.
    """

    kind: str
    mib: float
    status: int
    least_ms: float
    longest_ms: float
    answer_ms: float


class Kind(msgspec.Struct, frozen=True):
    """Kind of body. `make` takes the size in bytes."""

    path: str
    make: Callable[[int], bytes]


def _chat(messages: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"paced","max_tokens":1,"messages":[' + messages + b"]" + more + b"}"


def _many(piece: bytes, size: int) -> bytes:
    return b",".join([piece] * max(1, size // (len(piece) + 1)))


def _numbered(form: bytes, size: int) -> bytes:
    return b",".join(form % number for number in range(size // (len(form) + 5)))


def _user(text: bytes) -> bytes:
    return b'{"role":"user","content":"' + text + b'"}'


def _tools(size: int) -> bytes:
    schema = b'{"type":"object","properties":{' + _numbered(b'"p%d":{"type":"string"}', size // 400) + b"}}"
    tool = b'{"type":"function","function":{"name":"f%d","parameters":' + schema + b"}}"
    return _chat(_user(b"hi"), b',"tools":[' + b",".join(tool % number for number in range(400)) + b"]")


def _prompts(prompt: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"paced","max_tokens":1,"prompt":' + prompt + more + b"}"


def _responses(items: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"paced","max_output_tokens":1,"input":[' + items + b"]" + more + b"}"


PROSE: Final = b"The quick brown fox, it says, jumps over the lazy dog. "
CODE: Final = rb"def f(x):\n    return {\"a\": [x, 1], \"b\": g(x)}\n"
PART: Final = b'{"type":"text","text":"a"}'
KWARGS: Final = b',"chat_template_kwargs":{"a":['
BIAS: Final = b',"n":16,"logit_bias":{'
KINDS: Final[dict[str, Kind]] = {
    "text": Kind(CHAT, lambda n: _chat(_user(PROSE * (n // len(PROSE))))),
    "text, n = 7": Kind(CHAT, lambda n: _chat(_user(PROSE * (n // len(PROSE))), b',"n":7')),
    "code with escapes": Kind(CHAT, lambda n: _chat(_user(CODE * (n // len(CODE))))),
    "only escapes": Kind(CHAT, lambda n: _chat(_user(rb"\u20ac" * (n // 6)))),
    "no ASCII": Kind(CHAT, lambda n: _chat(_user("ä€".encode() * (n // 5)))),
    "messages of 1 KiB": Kind(CHAT, lambda n: _chat(_many(_user(CODE * 20), n))),
    "tiny messages": Kind(CHAT, lambda n: _chat(_many(_user(b""), n))),
    "49,000 tiny messages": Kind(CHAT, lambda n: _chat(_many(_user(b" " * (n // 49_000 - 30)), n))),
    "parts": Kind(
        CHAT, lambda n: _chat(b'{"role":"user","content":[' + _many(b'{"type":"text","text":"a"}', n) + b"]}")
    ),
    "lists in kwargs": Kind(
        CHAT, lambda n: _chat(_user(b""), b',"chat_template_kwargs":{"a":[' + _many(b"[]", n) + b"]}")
    ),
    "numbers in kwargs": Kind(CHAT, lambda n: _chat(_user(b""), KWARGS + _many(b"1e5", min(n, 4_000_000)) + b"]}")),
    "deep nesting": Kind(CHAT, lambda n: _chat(_user(b""), b',"metadata":' + b"[" * (n // 2) + b"]" * (n // 2))),
    "unknown fields": Kind(CHAT, lambda n: _chat(_user(b""), b"," + _numbered(b'"k%d":1', n))),
    "tools": Kind(CHAT, _tools),
    "bias, n = 16": Kind(
        COMPLETIONS, lambda n: _prompts(b'"a"', b',"n":16,"logit_bias":{' + _numbered(b'"%d":1', n) + b"}")
    ),
    "small bias, n = 16": Kind(COMPLETIONS, lambda n: _prompts(b'"a"', BIAS + _numbered(b'"%d":1', 150_000) + b"}")),
    "4,096 prompts, n = 16": Kind(COMPLETIONS, lambda n: _prompts(b"[" + _many(b'"a"', 4096 * 4) + b"]", b',"n":16')),
    "256 long prompts": Kind(COMPLETIONS, lambda n: _prompts(b"[" + _many(b'"' + b"x" * (n // 257) + b'"', n) + b"]")),
    "token ids": Kind(COMPLETIONS, lambda n: _prompts(b"[" + _many(b"12345", min(n, 6_000_000)) + b"]")),
    "blocks of base64": Kind(
        MESSAGES,
        lambda n: (
            b'{"model":"paced","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image","source":'
            b'{"type":"base64","media_type":"image/png","data":"' + b"iVBORw0K" * (n // 8) + b'"}}]}]}'
        ),
    ),
    "blocks of tool results": Kind(
        MESSAGES,
        lambda n: (
            b'{"model":"paced","max_tokens":1,"messages":[{"role":"user","content":['
            + _many(b'{"type":"tool_result","tool_use_id":"t","content":"' + CODE * 40 + b'"}', n)
            + b"]}]}"
        ),
    ),
    "items": Kind(RESPONSES, lambda n: _responses(_many(_user(CODE * 20), n))),
    "tiny items": Kind(RESPONSES, lambda n: _responses(_many(_user(b""), n))),
    "instructions": Kind(
        RESPONSES, lambda n: _responses(_user(b"hi"), b',"instructions":"' + PROSE * (n // len(PROSE)) + b'"')
    ),
    "half a body": Kind(CHAT, lambda n: _chat(_user(PROSE * (n // len(PROSE))))[:-9]),
}


class Probe(threading.Thread):
    """Thread that asks for `/livez` until it is stopped; `slowest_s` is the slowest answer since it was last reset."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._is_stopping = threading.Event()
        self.slowest_s = 0.0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._is_stopping.is_set():
            begun = time.perf_counter()
            connection.request("GET", "/livez")
            connection.getresponse().read()
            self.slowest_s = max(self.slowest_s, time.perf_counter() - begun)
            # The probe wakes often enough to hit every stall near its beginning.
            time.sleep(0.0005)
        connection.close()

    def stop(self) -> None:
        self._is_stopping.set()
        self.join()


def main() -> None:
    args = _arguments()
    print(machine()["cpu"], flush=True)
    alone, stalls = run(measure(args))
    print(f"{args.repeat} times each, ms; the slowest /livez in 3 seconds without a body: {alone:.1f} ms")
    print(as_table(stalls))
    if args.json:
        result = {"machine": machine(), "alone_ms": alone, "stalls": stalls}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))


async def measure(args: argparse.Namespace) -> tuple[float, list[Stall]]:
    """Measure the slowest answer without a body, then each kind in turn."""
    gateway = PacedGateway(step_ms=5.0)
    await gateway.start()
    probe = Probe(gateway.port)
    probe.start()
    sizes = [int(size * MIB) for size in args.mib]
    try:
        alone = await asyncio.to_thread(_alone, probe)
        orders = [(name, size) for name in args.kinds for size in sizes]
        stalls = [await asyncio.to_thread(_measure, gateway.port, probe, *order, args.repeat) for order in orders]
    finally:
        await asyncio.to_thread(probe.stop)
        await gateway.stop()
    return alone, stalls


def _alone(probe: Probe) -> float:
    time.sleep(SETTLE_S)
    probe.slowest_s = 0.0
    time.sleep(3.0)
    return round(probe.slowest_s * 1000, 1)


def _measure(port: int, probe: Probe, name: str, size: int, repeat: int) -> Stall:
    kind = KINDS[name]
    body = kind.make(size)
    status, taken = 0, 0.0
    slowest: list[float] = []
    for _ in range(repeat):
        time.sleep(SETTLE_S)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        probe.slowest_s = 0.0
        begun = time.perf_counter()
        connection.request("POST", kind.path, body, {"content-type": "application/json"})
        status = _status(connection)
        taken = max(taken, time.perf_counter() - begun)
        time.sleep(SETTLE_S)
        slowest.append(round(probe.slowest_s * 1000, 1))
        connection.close()
    return Stall(name, round(len(body) / MIB, 1), status, min(slowest), max(slowest), round(taken * 1000, 1))


def _status(connection: http.client.HTTPConnection) -> int:
    response = connection.getresponse()
    response.read()
    return response.status


def as_table(stalls: Sequence[Stall]) -> str:
    rows = [
        (
            stall.kind,
            str(stall.mib),
            str(stall.status),
            f"{stall.least_ms:.1f}",
            f"{stall.longest_ms:.1f}",
            f"{stall.answer_ms:.0f}",
        )
        for stall in stalls
    ]
    return table(("kind", "MiB", "status", "stall, least", "longest", "answer"), rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=lambda text: text.split(";"), default=list(KINDS), help="by `;`; all of them")
    parser.add_argument("--mib", type=lambda text: [float(part) for part in text.split(",")], default=[8, 30])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
