"""`mlxctl top`: models, requests, tokens and memory as they change."""

import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Annotated, Final

import typer
from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.control_types import RequestList, RequestView
from gateway.ctl import client
from gateway.ctl.models import ps_table
from gateway.ctl.offline import budget_bytes
from gateway.ctl.tables import (
    Json,
    RateSample,
    bar,
    compare,
    console,
    duration,
    headline,
    print_json,
    sample_rates,
    size,
    table,
)

# Only the oldest requests are shown, as many as a screen can hold.
STREAMS_MAX: Final = 20


class View(Struct, frozen=True):
    """One update of `top`."""

    budget_bytes: int
    sample: RateSample
    requests: list[RequestView]


def top(
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; the default if the output is not a terminal.")
    ] = False,
    json: Json = False,
) -> None:
    """Watch models, requests, tokens per second and memory. q or Ctrl-C ends it.

    Example: mlxctl top --interval 2
    """
    if json:
        print_json(look(interval))
    elif once or not sys.stdout.isatty():
        console().print(render(look(interval)))
    else:
        # Ctrl-C may come at any moment and, like q, ends the view.
        with suppress(KeyboardInterrupt):
            _live(interval)


def look(span_s: float) -> View:
    """Take two samples of the daemon. Raises `CommandFailed`."""
    return View(budget_bytes(client.status()), sample_rates(client.status, span_s), _requests())


def render(view: View) -> Group:
    sample = view.sample
    memory = f"{size(sample.memory_bytes)} of {size(view.budget_bytes)}"
    waiting = f", {sample.waiting} waiting" if sample.waiting else ""
    parts: list[RenderableType] = [
        headline(sample),
        f"memory   {bar(sample.memory_bytes, view.budget_bytes)} {memory}",
        f"requests {sample.running} running{waiting} · {sample.tokens_per_s:.1f} tokens/s",
        "",
        ps_table(sample, view.budget_bytes) if sample.models else Text("no model has a process", style="dim"),
    ]
    if view.requests:
        parts += ["", _streams(view.requests[:STREAMS_MAX])]
    if (more := len(view.requests) - STREAMS_MAX) > 0:
        parts.append(Text(f"and {more} more: mlxctl requests", style="dim"))
    return Group(*parts)


def _streams(requests: list[RequestView]) -> Table:
    rows = (
        (
            request.id,
            request.model,
            request.state,
            duration(request.age_s),
            request.prompt_tokens,
            request.cached_tokens,
            request.generated_tokens,
            f"{request.tokens_per_s:.1f}",
        )
        for request in requests
    )
    return table(("REQUEST", "MODEL", "STATE"), ("AGE", "PROMPT", "CACHED", "TOKENS", "TOK/S"), rows)


def _live(interval: float) -> None:
    """Update the view until it is interrupted. Raises `CommandFailed` if the daemon does not run, or ends."""
    from rich.live import Live

    before, began = client.status(), time.monotonic()
    view = View(budget_bytes(before), compare(before, before, 0.0), _requests())
    with _keys() as is_over, Live(render(view), console=console(), screen=True, auto_refresh=False) as live:
        while not is_over(interval):
            after, now = client.status(), time.monotonic()
            view = View(budget_bytes(after), compare(before, after, now - began), _requests())
            live.update(render(view), refresh=True)
            before, began = after, now


@contextmanager
def _keys() -> Generator[Callable[[float], bool], None, None]:
    """Yield a function that waits for some seconds or until q is pressed, and returns whether q was pressed."""
    if not sys.stdin.isatty():
        yield _unpressed
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        # cbreak mode delivers keys unbuffered and unechoed, and leaves Ctrl-C as it is.
        tty.setcbreak(terminal)
        yield _pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _pressed(seconds: float) -> bool:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False


def _unpressed(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _requests() -> list[RequestView]:
    return client.get("/v1/requests", RequestList).requests
