"""A closed loop of streaming requests: each client sends its next request as soon as it has an answer."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import msgspec

from gateway.ctl.bench.client import BenchConnection, Reply, Target
from gateway.ctl.bench.measure import Summary, summarize_ms, table

CHAT: Final = "chat"
COMPLETION: Final = "completion"
EMBEDDING: Final = "embedding"
_PATHS: Final = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions", EMBEDDING: "/v1/embeddings"}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """Settings that all requests of a benchmark have in common. `extra` is added to each request's body unchanged."""

    target: Target
    model: str
    endpoint: str = COMPLETION
    extra: dict[str, Any] | None = None
    timeout_s: float = 600.0

    @property
    def path(self) -> str:
        return _PATHS[self.endpoint]

    def body(self, job: BenchRequest) -> bytes:
        """Encode one streaming greedy request, or one request to embed a text, as JSON."""
        if self.endpoint == EMBEDDING:
            body = {"model": self.model, "input": job.prompt, "encoding_format": "base64"}
            return msgspec.json.encode(body | (self.extra or {}))
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": job.prompt}]} if self.endpoint == CHAT else {"prompt": job.prompt}
        )
        fixed = {"model": self.model, "max_tokens": job.max_tokens, "temperature": 0, "stream": True}
        return msgspec.json.encode(prompt | fixed | {"stream_options": {"include_usage": True}} | (self.extra or {}))


class Report(msgspec.Struct, frozen=True):
    """Result of one measurement. `tokens_per_s` divides the output tokens, as the server reports them, by the wall
    time. Embeddings have no output, so their prompt tokens are counted instead.
    """

    concurrency: int
    requests: int
    errors: int
    wall_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Summary
    itl_ms: Summary
    e2e_ms: Summary
    events_per_token: float
    first_errors: list[str]


async def closed_loop(load: BenchLoad, jobs: Sequence[BenchRequest], concurrency: int) -> tuple[float, list[Reply]]:
    """Send all `jobs` and return the time from the first request to the last answer, and the replies in order."""
    replies: list[Reply | None] = [None] * len(jobs)
    bodies = [load.body(job) for job in jobs]
    todo = iter(range(len(jobs)))
    connections = [BenchConnection(load.target) for _ in range(min(concurrency, len(jobs)))]

    async def client(connection: BenchConnection) -> None:
        for at in todo:
            reply = replies[at] = await connection.request(load.path, bodies[at], load.timeout_s)
            if load.endpoint == EMBEDDING and reply.ok:
                reply.prompt_tokens = _prompt_tokens(reply.body)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(client(connection))
    wall_s = time.perf_counter() - start
    for connection in connections:
        await connection.close()
    return wall_s, [reply for reply in replies if reply is not None]


async def sweep(
    load: BenchLoad, concurrencies: Sequence[int], jobs: Callable[[int], Sequence[BenchRequest]]
) -> list[Report]:
    """Run `closed_loop` once for each concurrency, with the requests that `jobs` returns, and return the reports."""
    reports: list[Report] = []
    for concurrency in concurrencies:
        wall_s, replies = await closed_loop(load, jobs(concurrency), concurrency)
        reports.append(report(concurrency, wall_s, replies, load_generates=load.endpoint != EMBEDDING))
    return reports


def report(concurrency: int, wall_s: float, replies: Sequence[Reply], *, load_generates: bool = True) -> Report:
    """Summarize replies. Tokens of failed requests do not count. An inter-token time is the gap between two events with
    text.
    """
    good = [reply for reply in replies if reply.ok]
    tokens = sum(reply.completion_tokens for reply in good)
    prompt_tokens = sum(reply.prompt_tokens for reply in good)
    events = sum(len(reply.times) for reply in good)
    failures = [reply.error or f"HTTP {reply.status}: {_refusal(reply.body)}" for reply in replies if not reply.ok]
    return Report(
        concurrency=concurrency,
        requests=len(replies),
        errors=len(failures),
        wall_s=round(wall_s, 4),
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        cached_tokens=sum(reply.cached_tokens for reply in good),
        tokens_per_s=round((tokens if load_generates else prompt_tokens) / wall_s, 2),
        requests_per_s=round(len(good) / wall_s, 3),
        ttft_ms=summarize_ms([reply.times[0] - reply.sent for reply in good if reply.times]),
        itl_ms=summarize_ms([b - a for reply in good for a, b in pairwise(reply.times)]),
        e2e_ms=summarize_ms([reply.ended - reply.sent for reply in good]),
        events_per_token=round(events / tokens, 3) if tokens else 0.0,
        first_errors=list(dict.fromkeys(failures))[:5],
    )


def _prompt_tokens(body: bytes) -> int:
    try:
        return int(msgspec.json.decode(body)["usage"]["prompt_tokens"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return 0


def _refusal(body: bytes) -> str:
    """Return the message of an error body, or the beginning of a body without one."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def as_table(reports: Sequence[Report]) -> str:
    """Format reports for people, one row for each concurrency."""
    header = (
        "clients", "requests", "errors", "tok/s", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "e2e p50", "p90",
        "p99 ms",
    )  # fmt: skip
    rows: list[list[str]] = []
    for report in reports:
        marks = [
            f"{mark:.1f}"
            for part in (report.ttft_ms, report.itl_ms, report.e2e_ms)
            for mark in (part.p50, part.p90, part.p99)
        ]
        rows.append(
            [str(report.concurrency), str(report.requests), str(report.errors), f"{report.tokens_per_s:.1f}", *marks]
        )
    return table(header, rows)
