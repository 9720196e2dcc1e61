"""A list of sessions sent to one engine: by clients in a closed loop, or by sessions that arrive at given times."""

import asyncio
import time
from itertools import pairwise
from typing import Any

import msgspec

from benchmarks.bare import Answer, Order
from benchmarks.engines import Bare, Drafts, Server
from benchmarks.measure import cpu_s, tree
from gateway.ctl.bench.closed_loop import BenchConnection, BenchLoad, BenchRequest, Reply


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of one request. `gaps_s` lie between tokens of the bare loop, and between a server's events with text.

    `tokens` of a request that the limit stopped counts the tokens of the text received by then.
    """

    finished: bool
    ttft_s: float | None
    gaps_s: list[float]
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    text: str
    error: str = ""


class Run(msgspec.Struct, frozen=True):
    """One list through one engine. Requests that had nothing before the limit may have no outcome."""

    wall_s: float
    cpu_s: float
    outcomes: list[Outcome | None]
    drafts: Drafts = Drafts()


class Load(msgspec.Struct, frozen=True):
    """Requests to send: by a number of clients, or at the times `due_s`. Everything stops after `limit_s`."""

    sessions: list[list[BenchRequest]]
    clients: int
    due_s: list[float]
    limit_s: float


async def drive(engine: Bare | Server, load: Load, tokenizer: Any) -> Run:
    """Send the whole list. Raises Unavailable when the bare loop has died."""
    if isinstance(engine, Bare):
        return await _through_bare(engine, load)
    processes = tree(engine.pid)
    earlier = await engine.drafts()
    before = cpu_s(processes)
    started = time.perf_counter()
    replies = await send(engine.load, load)
    wall_s = time.perf_counter() - started
    spent = cpu_s(processes) - before
    now = await engine.drafts()
    drafts = Drafts(now.tokens - earlier.tokens, now.accepted - earlier.accepted)
    return Run(wall_s, spent, [_outcome(reply, tokenizer) if reply else None for reply in replies], drafts)


async def _through_bare(engine: Bare, load: Load) -> Run:
    requests = [request for session in load.sessions for request in session]
    order = Order(
        prompts=[request.prompt for request in requests],
        max_tokens=[request.max_tokens for request in requests],
        concurrency=load.clients,
        turns=[len(session) for session in load.sessions],
        due_s=load.due_s,
        limit_s=load.limit_s,
    )
    answer = await engine.order(order)
    return Run(answer.wall_s, answer.cpu_s, [_bare_outcome(answer, at) for at in range(len(requests))])


def _bare_outcome(answer: Answer, at: int) -> Outcome | None:
    times = answer.token_s[at]
    if not times:
        return None
    return Outcome(
        finished=answer.finished[at],
        ttft_s=times[0] - answer.inserted_s[at],
        gaps_s=[b - a for a, b in pairwise(times)],
        tokens=len(times),
        prompt_tokens=answer.prompt_tokens[at],
        cached_tokens=0,
        text=answer.texts[at],
    )


async def send(target: BenchLoad, load: Load) -> list[Reply | None]:
    """Replies in the order of the requests; None for those that were not sent before the limit."""
    starts = [0]
    for session in load.sessions:
        starts.append(starts[-1] + len(session))
    replies: list[Reply | None] = [None] * starts[-1]
    todo = iter(range(len(load.sessions)))
    began = time.perf_counter()

    async def serve(connection: BenchConnection, at: int) -> None:
        for turn, request in enumerate(load.sessions[at]):
            try:
                await connection.request(target.path, target.body(request), target.timeout_s)
            finally:
                replies[starts[at] + turn] = connection.reply

    async def client() -> None:
        connection = BenchConnection(target.target)
        try:
            for at in todo:
                await serve(connection, at)
        finally:
            await connection.close()

    async def arrive(at: int) -> None:
        await asyncio.sleep(max(0.0, load.due_s[at] - (time.perf_counter() - began)))
        connection = BenchConnection(target.target)
        try:
            await serve(connection, at)
        finally:
            await connection.close()

    try:
        async with asyncio.timeout(load.limit_s), asyncio.TaskGroup() as group:
            if load.due_s:
                for at in range(len(load.sessions)):
                    group.create_task(arrive(at))
            else:
                for _ in range(min(load.clients, len(load.sessions))):
                    group.create_task(client())
    except TimeoutError:
        pass  # Requests that are cut off keep the text received so far.
    return replies


def _outcome(reply: Reply, tokenizer: Any) -> Outcome:
    finished = reply.ok and reply.ended > 0
    failure = reply.error or (f"HTTP {reply.status}: {reply.body[:200]!r}" if reply.ended and not reply.ok else "")
    return Outcome(
        finished=finished,
        ttft_s=reply.times[0] - reply.sent if reply.times else None,
        gaps_s=[b - a for a, b in pairwise(reply.times)],
        tokens=reply.completion_tokens if finished else len(tokenizer.encode(reply.text, add_special_tokens=False)),
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        text=reply.text,
        error=failure,
    )
