"""Tables and lines that `mlxctl` prints for people.

Output that the verbs share: `--json`, and text that is safe on a terminal.

Running models and their speed, computed from two samples a short while apart. `ps` and `top` use it.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
import typer
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.access.key import EXPIRY_MAX_S, Key
from gateway.config.source import parse_duration
from gateway.control_types import (
    DaemonStatus,
    GroupStatus,
    MemoryStatus,
    ModelStatus,
    Speeds,
    UsageLine,
    UsageLines,
    UsageReport,
)
from gateway.model_files.prefix_files import PrefixFolder
from protocol.checkpoint import SPEAKERS, TRANSCRIBERS

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Anyway = Annotated[bool, typer.Option("--yes", "-y", help="Load it even if its weights exceed the free memory.")]


def print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_result(value: object, text: str, json: bool) -> None:
    """Print a result: `value` for programs, `text` for people."""
    if json:
        print_json(value)
    else:
        typer.echo(text)


def records(lines: Iterable[bytes], decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    """Decode the records that a child process prints, one per line. Other lines come from a model's code and go to
    stderr.
    """
    for line in lines:
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            typer.echo(harmless(line.decode(errors="replace")), nl=False, err=True)


def console() -> Console:
    """Return a console that treats all text as data, never as markup. For a pipe it is wide, so that no text is cut
    off.
    """
    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 240)


def progress_bar(*columns: "ProgressColumn") -> "Progress":
    """Return a progress bar on stderr that counts bytes and has additional `columns`. It is shown on a
    terminal only.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    text, download = TextColumn("{task.description}", markup=False), DownloadColumn(binary_units=True)
    out = Console(stderr=True)
    return Progress(text, BarColumn(), download, *columns, console=out, transient=True, disable=not out.is_terminal)


def harmless(text: str) -> str:
    """Remove control characters: text of a client or a model must not control the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def seconds(text: str, option: str) -> float:
    """Parse a duration of the command line, such as 5m."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


SPAN_S: Final = 0.5


class ModelSample(ModelStatus, frozen=True, kw_only=True):
    """Status of a model with a process, and its rates. `memory_bytes` is the measured memory of the process if known,
    and `waiting` also counts requests that wait for the worker.
    """

    uptime_s: float
    tokens_per_s: float
    # Fraction of prompt tokens since the daemon's start that were cached; None if there were none.
    cache_hit_rate: float | None
    # Progress of a load, from 0 to 1.
    loaded: float


class RateSample(Struct, frozen=True):
    """All running models and their sums. `waiting` also counts requests for models without a process."""

    version: str
    url: str
    pid: int
    uptime_s: float
    is_draining: bool
    span_s: float
    memory_bytes: int
    running: int
    waiting: int
    tokens_per_s: float
    models: list[ModelSample]


def sample_rates(look: Callable[[], DaemonStatus], span_s: float) -> RateSample:
    """Sample the daemon twice and compute rates. If no model has a request, one sample is enough."""
    before = look()
    if not any(model.inside for model in before.models):
        return compare(before, before, 0.0)
    began = time.monotonic()
    time.sleep(span_s)
    return compare(before, look(), time.monotonic() - began)


def compare(before: DaemonStatus, after: DaemonStatus, span_s: float) -> RateSample:
    """Compute rates between two samples."""
    old = {model.name: model for model in before.models}
    models = [_model(old.get(model.name), model, span_s) for model in after.models if model.pid]
    return RateSample(
        version=after.version,
        url=after.url,
        pid=after.pid,
        uptime_s=after.uptime_s,
        is_draining=after.is_draining,
        span_s=round(span_s, 3),
        memory_bytes=sum(model.memory_bytes for model in models),
        running=sum(model.running for model in models),
        waiting=sum(waiting(model) for model in after.models),
        tokens_per_s=round(sum(model.tokens_per_s for model in models), 1),
        models=models,
    )


def waiting(model: ModelStatus) -> int:
    """Count the requests that wait, inside the worker or for the worker."""
    return max(model.waiting, model.inside - model.running)


def _model(before: ModelStatus | None, after: ModelStatus, span_s: float) -> ModelSample:
    # The gateway keeps this counter, so a worker's restart does not reset it.
    tokens = max(0, after.generation_tokens - (before or after).generation_tokens)
    own: dict[str, Any] = {
        "uptime_s": _uptime_s(after.pid),
        "waiting": waiting(after),
        # The footprint is the measured memory of the process; 0 if it could not be measured.
        "memory_bytes": after.footprint_bytes or after.memory_bytes,
        "tokens_per_s": round(tokens / span_s, 1) if span_s else 0.0,
        "cache_hit_rate": round(after.prompt_tokens_cached / after.prompt_tokens, 4) if after.prompt_tokens else None,
        "loaded": after.loaded_bytes / after.total_bytes if after.total_bytes else 0.0,
    }
    same = {name: getattr(after, name) for name in ModelStatus.__struct_fields__ if name not in own}
    return ModelSample(**own, **same)


def _uptime_s(pid: int) -> float:
    import psutil

    try:
        return round(max(0.0, time.time() - psutil.Process(pid).create_time()), 1)
    except psutil.Error:
        return 0.0


# Drafted tokens before which the gain of drafts is too uncertain to be shown.
MIN_GAIN_TOKENS = 1000
# Models of these kinds generate no tokens.
OUTPUT_UNITS = {"embed": "embeddings", "rerank": "scores of pairs", "audio": "transcripts or speech"}
STATE_COLORS = {
    "ready": "green",
    "loading": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "stopped": "dim",
    "not configured": "dim",
}


def status(status: DaemonStatus) -> None:
    """Print one line for the daemon and one row for each model."""
    out = console()
    out.print(headline(status), soft_wrap=True)
    if status.memory is not None:
        out.print(_memory(status.memory), soft_wrap=True)
    numbers = ("PID", "RUN", "WAIT", "MEMORY", "SHARE", "IDLE", "CONTEXT", "TOKENS", "CRASHES")
    out.print(table(("MODEL", "STATE"), numbers, map(_row, status.models), ("ALIASES",)))
    notes(status.models)
    for model in status.models:
        if model.group is not None:
            ranks(model.name, model.group)
    for model in status.models:
        if model.kind in OUTPUT_UNITS:
            length = f" of {model.dimensions} numbers" if model.dimensions else ""
            out.print(f"{model.name}: makes {OUTPUT_UNITS[model.kind]}{length}")
    for model in status.models:
        if model.last_failure and model.state not in ("ready", "draining"):
            again = f" (next try in {duration(model.retry_after_s)})" if model.retry_after_s else ""
            out.print(f"{model.name}: {model.last_failure}{again}", style="red")


def ranks(name: str, group: GroupStatus) -> None:
    """Print the ranks of a model that several processes run."""
    out = console()
    out.print(f"{name}: {len(group.ranks)} ranks, {group.parallel} parallel by {group.backend}")
    for rank in group.ranks:
        place = " ".join(part for part in (rank.node, rank.host and f"({rank.host})", f"pid {rank.pid}") if part)
        weights, active = size(rank.weights_bytes), size(rank.active_bytes)
        out.print(f"  rank {rank.rank}: {place}, weights {weights}, {active} allocated, step {rank.step_ms:.1f} ms")


def notes(models: Sequence[ModelStatus]) -> None:
    """Print notes about models: slower batch modes, the state and gain of drafting, and measured speeds."""
    out = console()
    for model in models:
        if model.batch_mode_reason:
            out.print(f"{model.name}: {model.batch_mode_reason}", style="yellow")
        if model.speculation.startswith(("off, ", "auto, ")):
            out.print(f"{model.name}: speculation is {model.speculation}")
        if model.attention.startswith("mlx, "):
            out.print(f"{model.name}: attention by {model.attention}")
        if model.measured is not None and (model.measured.decode or model.measured.prefill):
            out.print(f"{model.name}: {measured(model.measured)}")
        if model.drafted_tokens:
            right = 100 * model.accepted_tokens // model.drafted_tokens
            tokens = "1 token" if model.drafted_tokens == 1 else f"{model.drafted_tokens} tokens"
            gain = f"; steps with drafts give {model.draft_gain:.2f} × the tokens a second of steps without"
            has_gain = model.drafted_tokens >= MIN_GAIN_TOKENS and model.draft_gain > 0
            out.print(f"{model.name}: {tokens} drafted, {right} % right{gain if has_gain else ''}")
        if model.sparse_prompts:
            part = 100 * model.sparse_kept_tokens // max(1, model.sparse_prompt_tokens)
            prompts = f"{model.sparse_prompts} prompt{'' if model.sparse_prompts == 1 else 's'}"
            out.print(
                f"{model.name}: {prompts} prefilled sparsely, {part} % of {model.sparse_prompt_tokens} tokens kept"
            )


def output_unit(kind: str, family: str) -> str:
    """Return what a model of a kind makes; an audio model's family says which of both."""
    if family in TRANSCRIBERS:
        return "transcripts"
    return "speech" if family in SPEAKERS else OUTPUT_UNITS[kind]


def measured(speeds: Speeds) -> str:
    """Format the measured speeds of a model as one line."""
    parts = [f"{rate:.0f} tok/s with {rows} row{'' if rows == 1 else 's'}" for rows, rate in speeds.decode]
    if speeds.prefill:
        parts.append(f"prompts {speeds.prefill:.0f} tok/s")
    if speeds.load_s:
        parts.append(f"load {speeds.load_s:.1f} s")
    how = "calibrated" if speeds.calibrated_at else "measured"
    best = f"; max_running = {speeds.max_running} is enough" if speeds.max_running else ""
    return f"{how} here: {', '.join(parts)}{best}"


def headline(daemon: DaemonStatus | RateSample) -> str:
    draining = " · draining" if daemon.is_draining else ""
    return f"mlxd {daemon.version} at {daemon.url} · pid {daemon.pid} · up {duration(daemon.uptime_s)}{draining}"


def _memory(memory: MemoryStatus) -> str:
    waiting = f" · room is being made for {', '.join(memory.waiting)}" if memory.waiting else ""
    granted, budget = size(memory.granted_bytes), size(memory.budget_bytes)
    return f"memory: {granted} of {budget} granted, {size(memory.footprint_bytes)} in use{waiting}"


def _row(model: ModelStatus) -> tuple[object, ...]:
    state = model.state
    if state == "loading" and model.total_bytes:
        state = f"loading {100 * model.loaded_bytes // model.total_bytes}%"
    elif model.is_waiting:
        state = "waiting for memory"
    elif model.is_gated:
        state = "making room"
    if model.is_pinned:
        state += ", pinned"
    return (
        model.name,
        state_text(model.state, state),
        model.pid or "-",
        f"{model.running}/{model.slots}",
        waiting(model),
        size(model.footprint_bytes or model.memory_bytes) if model.memory_bytes else "-",
        size_or_dash(model.share_bytes),
        "-" if model.idle_s is None else duration(model.idle_s),
        model.context or "-",
        model.generation_tokens,
        model.restarts,
        ", ".join(model.aliases) or "-",
    )


def state_text(state: str, text: str = "") -> Text:
    """Colour a state. `text`, if given, is shown in place of its name."""
    return Text(text or state, style=STATE_COLORS.get(state, "red"))


def size_or_dash(count: int) -> str:
    return size(count) if count else "-"


def size(count: float) -> str:
    """Format a number of bytes in binary units with three figures."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def bar(part: int, whole: int, width: int = 30) -> str:
    """Draw the ratio of `part` to `whole` as a bar of blocks. Any part above zero gets at least one block."""
    full = min(width, -(-part * width // whole)) if part > 0 and whole > 0 else 0
    return "█" * full + "░" * (width - full)


def duration(seconds: float) -> str:
    """Format a duration by its two largest units: `3d 4h`, `5m 2s`."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def keys(found: Sequence[Key], used: Mapping[str, float], now: float) -> None:
    """Print one row for each API key. Limits that few keys have are listed below the table."""
    out = console()
    numbers = ("RPM", "TPM", "AT ONCE", "PRIORITY", "STATE", "EXPIRES", "AGE", "LAST USED")
    out.print(table(("NAME", "KEY", "MODELS"), numbers, (_key_row(key, used.get(key.name), now) for key in found)))
    for key in found:
        if more := _more_limits(key):
            out.print(f"{key.name}: {more}")


def _key_row(key: Key, last_used: float | None, now: float) -> tuple[object, ...]:
    state = _key_state(key, now)
    return (
        key.name,
        f"{key.prefix}…",
        _key_models(key),
        key.rpm or "-",
        key.tpm or "-",
        key.concurrency or "-",
        key.priority,
        Text(state, style="" if state == "active" else "red"),
        _key_expiry(key, now),
        duration(now - key.created),
        "never" if last_used is None else f"{duration(max(0.0, now - last_used))} ago",
    )


def _key_models(key: Key) -> str:
    if key.is_metrics_only:
        return "none (metrics)"
    return "all (admin)" if key.is_admin else ", ".join(key.models) or "all"


def _key_state(key: Key, now: float) -> str:
    if key.is_expired(now):
        return "expired"
    if not key.is_usable:
        return "disabled" if key.is_disabled else f"needs a later mlxd ({', '.join(key.requires)})"
    return "active"


def _key_expiry(key: Key, now: float) -> str:
    if key.expires is None or key.expires > EXPIRY_MAX_S:
        return "never"
    return f"{duration(now - key.expires)} ago" if key.is_expired(now) else f"in {duration(key.expires - now)}"


def _more_limits(key: Key) -> str:
    numbers = (
        (key.requests_per_day, "requests a day"),
        (key.tokens_per_day, "tokens a day"),
        (key.requests_per_month, "requests a month"),
        (key.tokens_per_month, "tokens a month"),
        (key.max_sequences, "sequences a request"),
        (key.max_tokens, "tokens an answer"),
        (key.queue_share, "% of a queue"),
    )
    return ", ".join(f"{number} {text}" for number, text in numbers if number)


def usage(report: UsageReport) -> None:
    """Print the usage of each API key that was valid at some time since the daemon started."""
    out = console()
    rows = (
        (key.name, key.requests, key.running, key.prompt_tokens, key.completion_tokens, _counts(key.rejections) or "-")
        for key in report.keys
    )
    out.print(table(("NAME",), ("REQUESTS", "RUNNING", "PROMPT", "COMPLETION", "REJECTED"), rows))
    if report.failures:
        out.print(f"without a valid key: {_counts(report.failures)}")


def _counts(by_reason: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(by_reason.items()))


def usage_lines(report: UsageLines) -> None:
    """Print one row for each line of usage, and one for their sum."""
    out = console()
    rows: list[Sequence[object]] = [
        (*(getattr(line, name) or "(no key)" for name in report.by), *_usage_numbers(line)) for line in report.lines
    ]
    if len(rows) > 1 and report.by:
        sums = map(sum, zip(*map(_usage_numbers, report.lines), strict=True))
        rows.append(("all", *[""] * (len(report.by) - 1), *sums))
    out.print(f"{report.first} to {report.last}")
    names = [name.upper() for name in report.by]
    out.print(table(names, ("REQUESTS", "PROMPT", "CACHED", "COMPLETION"), rows) if rows else "Nothing was used.")


def _usage_numbers(line: UsageLine) -> tuple[int, int, int, int]:
    return (line.requests, line.prompt_tokens, line.cached_tokens, line.completion_tokens)


def cache(folders: Sequence[PrefixFolder], now: float) -> None:
    """Print one row for each folder of the prefix cache on disk."""
    rows = (
        (
            folder.model or "?",
            folder.key[:12],
            folder.files,
            size(folder.size_bytes),
            f"{duration(max(0.0, now - folder.used))} ago",
        )
        for folder in folders
    )
    console().print(table(("MODEL", "FOLDER"), ("FILES", "SIZE", "LAST USED"), rows))


def table(
    texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[object]], more: Sequence[str] = ()
) -> Table:
    """Make a table: columns of text, then of numbers, then of text again. A cell is a `Text` with a style, or a plain
    string.
    """
    result = Table(box=None, pad_edge=False, header_style="bold")
    for name in texts:
        result.add_column(name, overflow="fold")
    for name in numbers:
        result.add_column(name, justify="right", no_wrap=True)
    for name in more:
        result.add_column(name, overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return result
