"""Tables and lines that `mlxctl` prints for people."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from gateway.access.key import EXPIRY_MAX_S, Key
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
from gateway.ctl.printing import console
from gateway.ctl.rates import RateSample, waiting
from gateway.model_files.prefix_files import PrefixFolder
from protocol.kinds import SPEAKERS, TRANSCRIBERS

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
