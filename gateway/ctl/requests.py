"""`mlxctl requests`, `mlxctl cancel` and `mlxctl why`: requests, how to end one, and why one was slow."""

from contextlib import suppress
from datetime import datetime
from typing import Annotated
from urllib.parse import quote

import msgspec
import typer

from gateway.control_types import (
    CancelResult,
    CapturedRequest,
    ClearedCaptures,
    RequestDetail,
    RequestList,
    RequestView,
    RequestWhy,
)
from gateway.ctl.client import get, post
from gateway.ctl.tables import Json, console, duration, harmless, print_json, print_result, table

Id = Annotated[str, typer.Argument(help="A request's id, as mlxctl requests and the log show it.", show_default=False)]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def requests(
    context: typer.Context,
    captured: Annotated[bool, typer.Option("--captured", help="Include captured requests that have finished.")] = False,
    json: Json = False,
) -> None:
    """Show the running requests: phase, tokens and speed of each.

    Example: mlxctl requests
    """
    if context.invoked_subcommand is not None:
        return
    listed = get(f"/v1/requests?captured={int(captured)}", RequestList)
    if json:
        print_json(listed)
    else:
        _table(listed)


@app.command()
def show(request: Id, json: Json = False) -> None:
    """Show a request: its phase, and its whole prompt and answer if it was captured.

    Example: mlxctl requests show req_0123456789abcdef01234567
    """
    detail = get(f"/v1/requests/{quote(request, safe='')}", RequestDetail)
    if json:
        print_json(detail)
        return
    if detail.live is not None:
        for name, value in _facts(detail.live):
            typer.echo(f"{name:<10} {value}")
    if detail.captured is not None:
        _print(detail.captured)


@app.command()
def clear(json: Json = False) -> None:
    """Delete every captured request.

    Example: mlxctl requests clear
    """
    done = post("/v1/requests/clear", {}, ClearedCaptures)
    print_result(done, f"{done.captured} captured request{'' if done.captured == 1 else 's'} deleted", json)


def cancel(request: Id, json: Json = False) -> None:
    """End a request. Its client is told that the operator did it. Exit status 1 when there is none of this id.

    Example: mlxctl cancel req_0123456789abcdef01234567
    """
    done = post("/v1/requests/cancel", {"id": request}, CancelResult)
    print_result(done, f"{done.id} is cancelled", json)


def why(request: Id, json: Json = False) -> None:
    """Explain why a request was slow: what it waited for, and why its prompt was not cached, the worst cause first.

    The id may also be that of the answer. The newest thousand requests that have ended are known.

    Example: mlxctl why req_0123456789abcdef01234567
    """
    found = get(f"/v1/requests/{quote(request, safe='')}/why", RequestWhy)
    if json:
        print_json(found)
        return
    timing = found.timing
    first = "no token" if timing.ttft_ms is None else f"first token after {_seconds(timing.ttft_ms)}"
    typer.echo(f"{found.id} for {found.model} took {_seconds(timing.total_ms)}, {first} ({found.outcome})")
    typer.echo(
        f"prompt of {timing.prompt_tokens} tokens, {timing.cached_tokens} of them cached"
        f"{f' ({timing.restored_tokens} from disk)' if timing.restored_tokens else ''}; "
        f"answer of {timing.completion_tokens}"
    )
    for cause in found.causes:
        typer.echo(harmless(f"{_seconds(cause.ms) if cause.ms else '-':>9}  {cause.text}"))


def _seconds(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"


def _table(found: RequestList) -> None:
    if not found.requests and not found.captured:
        typer.echo("nothing is being served")
        return
    if found.requests:
        rows = (
            (
                request.id,
                request.model,
                request.key or "-",
                request.path,
                request.state,
                duration(request.age_s),
                request.prompt_tokens or "-",
                request.cached_tokens or "-",
                request.generated_tokens or "-",
                request.tokens_per_s or "-",
            )
            for request in found.requests
        )
        numbers = ("AGE", "PROMPT", "CACHED", "TOKENS", "TOK/S")
        console().print(table(("ID", "MODEL", "KEY", "PATH", "STATE"), numbers, rows))
    for line in found.captured:
        when = datetime.fromtimestamp(line.at).astimezone().isoformat(" ", "seconds")
        text = f"{when} {line.id} {line.status} {line.path} {line.model or '-'} {line.ms:.0f} ms {line.outcome}"
        console().print(text, soft_wrap=True)


def _facts(view: RequestView) -> list[tuple[str, object]]:
    ttft = "-" if view.ttft_s is None else f"{view.ttft_s:.3f} s"
    return [
        ("id", view.id),
        ("model", view.model),
        ("key", view.key or "-"),
        ("path", f"{view.path}{' (stream)' if view.stream else ''}"),
        ("state", view.state),
        ("age", f"{view.age_s:.1f} s"),
        ("prompt", f"{view.prompt_tokens} tokens, {view.cached_tokens} of them cached"),
        ("generated", f"{view.generated_tokens} tokens, {view.tokens_per_s:g} a second"),
        ("ttft", ttft),
    ]


def _print(captured: CapturedRequest) -> None:
    when = datetime.fromtimestamp(captured.at).astimezone().isoformat(" ", "milliseconds")
    typer.echo(f"{captured.id} at {when}: {captured.status} {captured.outcome} after {captured.ms:.0f} ms")
    typer.echo(f"\n{captured.method} {captured.path}")
    _message(captured.request_headers, captured.request_body, captured.is_request_cut)
    typer.echo(f"\n{captured.status}")
    _message(captured.response_headers, captured.response_body, captured.is_response_cut)


def _message(headers: list[tuple[str, str]], body: str, is_cut: bool) -> None:
    for name, value in headers:
        typer.echo(harmless(f"{name}: {value}"))
    # An event stream or a truncated body is no valid JSON and is printed as it is.
    with suppress(msgspec.DecodeError):
        body = msgspec.json.format(body, indent=2)
    typer.echo("\n" + harmless(body) + ("\n[cut here]" if is_cut else ""))
