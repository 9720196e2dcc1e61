"""Verbs about the Hugging Face hub.

`mlxctl search` and `mlxctl recommend`: models of the hub that MLX loads and that fit this machine.

`mlxctl info`: the memory and disk needs of a model on this machine or on the hub.

`mlxctl pull`: downloads a model from the Hugging Face hub into the local cache.
"""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import typer
from msgspec import structs
from rich.text import Text

from gateway.command_failed import CommandFailed
from gateway.config.experimental import experiments_of
from gateway.config.settings import ModelConfig
from gateway.ctl.offline import (
    available_bytes,
    folder_of,
    model_argument,
    model_of,
    naming_models_here,
    read_config,
    readable_config,
    running_models,
)
from gateway.ctl.tables import (
    OUTPUT_UNITS,
    Json,
    console,
    duration,
    measured,
    output_unit,
    print_json,
    progress_bar,
    size,
    size_or_dash,
    table,
)
from gateway.media.modalities import SETUP, has_towers_library
from gateway.model_files.hub_cache import MAIN, split_revision
from gateway.model_files.known_times import KnownTimes, speeds
from gateway.model_files.metadata import ModelMetadata, Unreadable, adapter_sizes, inspect
from protocol.checkpoint import TEXT
from protocol.timing_profile import profiles_dir

if TYPE_CHECKING:
    from gateway.model_files.download import DownloadPlan
    from gateway.model_files.search import FoundRepository

Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=50, help="Most models to list.")]


def search(
    words: Annotated[list[str], typer.Argument(help="Words that the repository's name has.", metavar="WORDS...")],
    limit: Limit = 10,
    every: Annotated[
        bool, typer.Option("--all", help="List also models that do not fit or cannot be loaded, with the reason.")
    ] = False,
    json: Json = False,
) -> None:
    """Search the hub for MLX models that can be loaded and fit this machine, the most downloaded first.

    Without a network, mlxd's own short list is searched. Exit status 1 if no model is listed.

    Example: mlxctl search qwen3 coder
    """
    from gateway.model_files.hub import HubFailed
    from gateway.model_files.search import search as search_hub
    from gateway.model_files.search import search_shortlist

    available, offline = available_bytes(), ""
    try:
        found = search_hub(words, available, limit)
    except HubFailed as error:
        found, offline = search_shortlist(words, available), str(error)
    listed = found if every else [model for model in found if model.is_usable][:limit]
    _show(listed, offline, json)
    hidden = len(found) - len(listed)
    if listed and hidden and not json:
        typer.echo(f"{hidden} more cannot be used here; --all lists them with the reason", err=True)
    if not listed:
        matches = f", but {hidden} that cannot; --all lists them with the reason" if hidden else ""
        typer.echo(f"mlxctl: no model for {' '.join(words)} can be used here{matches}", err=True)
        raise typer.Exit(1)


def recommend(limit: Limit = 10, json: Json = False) -> None:
    """List models that fit this machine with memory left for long prompts.

    The models of mlxd's own short list come first, then the hub's most downloaded. Without a network, only the short
    list is used. Exit status 1 if no model is listed.

    Example: mlxctl recommend
    """
    from gateway.model_files.search import recommend as recommend_from_hub

    found = recommend_from_hub(available_bytes(), limit)
    _show(found.candidates, found.offline, json)
    if not found.candidates:
        typer.echo("mlxctl: no model of the list fits this machine now (mlxctl status shows what is loaded)", err=True)
        raise typer.Exit(1)


def _show(models: "list[FoundRepository]", offline: str, json: bool) -> None:
    if offline:
        typer.echo(f"mlxctl: {offline}; this is mlxd's own short list", err=True)
    if json:
        print_json(models)
    elif models:
        _table(models)
        typer.echo(f"Talk to one: mlxctl run {models[0].repository}", err=True)


def _table(models: "list[FoundRepository]") -> None:
    last = ("FITS", "FOR") if any(model.purpose for model in models) else ("FITS",)
    rows = (
        (
            model.repository,
            size_or_dash(model.info.disk_bytes if model.info else 0),
            size_or_dash(model.info.weights_bytes if model.info else 0),
            (model.info and model.info.context) or "-",
            "-" if model.downloads is None else f"{model.downloads:,}",
            ("here already" if model.is_downloaded else "yes") if model.is_usable else Text(model.reason, style="red"),
            *(model.purpose or "-" for _ in last[1:]),
        )
        for model in models
    )
    console().print(table(("MODEL",), ("DISK", "MEMORY", "CONTEXT", "DOWNLOADS"), rows, last))


HEAD: Final = "for multi-token prediction: drafts where that pays"


def info(
    model: Annotated[
        str, model_argument("A model's name or alias, a folder, or a repository (ORG/NAME or ORG/NAME@REVISION).")
    ],
    json: Json = False,
) -> None:
    """Say what a model needs and whether it fits this machine now, also before it is downloaded. Exit status 1 if not.

    Example: mlxctl info mlx-community/Qwen3-4B-4bit
    """
    from gateway.config.worker_spec_and_group import indivisible_model_reason

    config = read_config()
    configured = model_of(config, model)
    times = KnownTimes(profiles_dir(config.home)).of(configured.name, configured.path)
    info = structs.replace(
        _look(configured),
        measured=speeds(times),
        adapters=adapter_sizes(configured.adapters),
        experimental=tuple(map(str, experiments_of(config.server, configured))),
    )
    if configured.group.ranks and (reason := indivisible_model_reason(configured)):
        info = structs.replace(info, obstacles=(*info.obstacles, f"as a group: {reason}"))
    if json:
        print_json(info)
    else:
        print_info(model, info)
    if not info.fits or info.obstacles:
        raise typer.Exit(1)


def print_info(name: str, info: ModelMetadata, echo: Callable[[str], None] = typer.echo) -> None:
    """Print what is known about a model, line by line: its memory, its context, and whether it fits."""
    place = info.path if info.is_downloaded else f"not downloaded (mlxctl pull {info.path})"
    echo(f"{name}: {info.model_type or '?'}, {place}")
    if info.kind in OUTPUT_UNITS:
        echo(f"makes      {output_unit(info.kind, info.family)}")
    echo(f"weights    {size(info.weights_bytes)} in memory, {size(info.disk_bytes)} on disk")
    if info.expert_bytes:
        held, total = size(info.expert_cache_bytes), size(info.expert_bytes)
        echo(f"experts    {held} of {total} in memory, the others are read from disk when they are chosen")
    _print_lengths(info, echo)
    if info.modalities:
        echo(f"media      {', '.join(info.modalities)}; {size(info.tower_bytes)} of the weights encode them")
        if not has_towers_library():
            echo(typer.style(f"           not served without mlx-vlm: {SETUP}", fg="yellow"))
    if info.adapters:
        sizes = (f"{name} {size(count) if count else '(not here)'}" for name, count in info.adapters.items())
        echo(f"adapters   {', '.join(sizes)} beside the weights")
    if info.measured is not None:
        echo(f"speed      {measured(info.measured)}")
    if info.head:
        echo(f"head       {HEAD if info.head == 'run' else info.head}")
    echo(f"available  {size(info.available_bytes)}")
    echo(info.verdict)
    for experiment in info.experimental:
        echo(typer.style(f"experimental: {experiment}", fg="yellow"))
    for obstacle in info.obstacles:
        echo(typer.style(f"cannot be loaded: {obstacle}", fg="red"))


def _print_lengths(info: ModelMetadata, echo: Callable[[str], None]) -> None:
    """Print the KV of a model that has some, and its context, or the longest input of an encoder."""
    if info.kind == TEXT:
        kv = "not computed for this attention"
        if info.kv_1k_bytes is not None:
            kv = f"{size(info.kv_1k_bytes)} per 1,000 tokens" + (f", in {info.kv_bits} bits" if info.kv_bits else "")
        if info.kv_window_bytes:
            kv += f", and up to {size(info.kv_window_bytes)} for sliding windows"
        echo(f"KV         {kv}")
        if info.kv_warning:
            echo(typer.style(f"           {info.kv_warning}", fg="yellow"))
    elif not info.context:
        return
    context = f"{info.context or '?'} tokens"
    if info.tokens_max is not None and info.context and info.tokens_max < info.context:
        context += f", of which memory holds {info.tokens_max}"
    echo(f"context    {context}")


def _look(model: ModelConfig) -> ModelMetadata:
    """Inspect the model's files on this machine, or else on the hub. Raises `CommandFailed`."""
    try:
        folder = folder_of(model.path)
        return inspect(folder, model.dtype, model.context, available_bytes(), model.kv_bits or 0)
    except Unreadable as error:
        if not is_repository(model.path):
            raise CommandFailed(str(error)) from None
        return _on_hub(model, error)


def _on_hub(model: ModelConfig, here: Exception) -> ModelMetadata:
    from gateway.model_files import hub

    try:
        repository = hub.fetch_repository(*split_revision(model.path))
        info = hub.inspect(repository, model.dtype, model.context, available_bytes(), model.kv_bits or 0)
        if info is None:
            raise CommandFailed(f"{repository.id} cannot be loaded: {'; '.join(hub.obstacles(repository))}")
    except hub.HubFailed as error:
        raise CommandFailed(f"{here}\n{error}") from None
    return info


def is_repository(path: str) -> bool:
    """Whether a path could be the name of a repository on the hub."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


PROGRESS_INTERVAL_S: Final = 0.5


def pull(
    repository: Annotated[
        str,
        typer.Argument(
            help="Repository of the Hugging Face hub, at main or another revision.", metavar="ORG/NAME[@REVISION]"
        ),
    ],
    include: Annotated[
        list[str] | None,
        typer.Option(help="Download only files of this pattern; may be repeated. Default: all files that MLX reads."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask, even if the model will not fit or load.")
    ] = False,
    json: Json = False,
    events: Annotated[bool, typer.Option("--events", hidden=True)] = False,
) -> None:
    """Download a model, or the rest of one. Says first whether it fits, in memory and on the disk. No daemon is needed.

    A token for gated and private models is taken from HF_TOKEN.

    Example: mlxctl pull mlx-community/Qwen3-4B-4bit
    """
    began = time.monotonic()
    if events:
        pulled = download(repository, include, yes, _silent, _progress_lines)
        size = pulled.plan.total_bytes
        _print_line(size, size, path=str(pulled.path), next_step=how_to_serve(pulled.plan, pulled.path))
        return
    with naming_models_here():
        pulled = download(repository, include, yes, _silent if json else typer.echo)
    if json:
        print_json(_result(pulled))
    else:
        _print_next_step(pulled.plan, pulled.path, time.monotonic() - began)


class PullResult(NamedTuple):
    """A complete download with the plan and the estimate that preceded it."""

    plan: "DownloadPlan"
    info: ModelMetadata | None
    obstacles: list[str]
    path: Path


# A `Progress` takes a plan and returns a context manager. It yields a callback for the number of bytes received, which
# several threads call.
Progress = Callable[["DownloadPlan"], AbstractContextManager[Callable[[int], None]]]


def download(
    name: str, include: list[str] | None, yes: bool, echo: Callable[[str], None], progress: Progress | None = None
) -> PullResult:
    """Print whether a model fits in memory and on the disk, then download it. Raises `CommandFailed`."""
    plan, found, obstacles = _plan(name, include)
    if found is not None:
        print_info(name, found, echo)
    else:
        echo(f"{name}: nothing is known of what it needs in memory")
    _check_space(plan, echo)
    if plan.missing_bytes:
        _confirm(plan, found, obstacles, yes)
    with (progress or _progress)(plan) as arrived:
        path = _fetch(plan, arrived)
    return PullResult(plan, found, obstacles, path)


def _silent(_: str) -> None:
    """Print nothing, because JSON output has no place for text."""


def _plan(name: str, include: list[str] | None) -> "tuple[DownloadPlan, ModelMetadata | None, list[str]]":
    """Return the download plan, the model's needs, and the obstacles to loading it. Raises `CommandFailed`."""
    from gateway.model_files import hub
    from gateway.model_files.download import plan

    repository = hub.fetch_repository(*split_revision(name))
    selected = plan(repository, include or hub.WANTED)
    info = hub.inspect(repository, "auto", 0, available_bytes())
    return selected, info, list(info.obstacles) if info is not None else hub.obstacles(repository)


def _check_space(plan: "DownloadPlan", echo: Callable[[str], None]) -> None:
    """Check that the disk has enough free space. Raises `CommandFailed`."""
    from gateway.model_files.download import RESERVE_BYTES, space

    disk = space(plan)
    if not disk.is_enough:
        raise CommandFailed(
            f"{plan.repository.id} needs {size(disk.needed_bytes)} more, and {size(disk.free_bytes)} are free in "
            f"{disk.folder}: free {size(disk.needed_bytes + RESERVE_BYTES - disk.free_bytes)} first (mlxctl models "
            "shows what is there, mlxctl rm removes), or set HF_HUB_CACHE to a larger disk"
        )
    here = f", {size(plan.here_bytes)} of them here" if plan.here_bytes else ""
    echo(
        f"download   {len(plan.files)} files, {size(plan.total_bytes)}{here}; "
        f"{size(disk.free_bytes)} are free in {disk.folder}"
    )


def _confirm(plan: "DownloadPlan", found: ModelMetadata | None, obstacles: list[str], yes: bool) -> None:
    """Ask before downloading a model that does not fit or cannot be loaded."""
    doubts = [f"{plan.repository.id} cannot be loaded: {obstacle}" for obstacle in obstacles]
    if found is not None and not found.fits:
        doubts.append(f"{plan.repository.id} {found.verdict}")
    for doubt in doubts:
        typer.secho(f"mlxctl: {doubt}", fg="yellow", err=True)
    if not doubts or yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed("not downloaded; --yes downloads it anyway")
    if not typer.confirm("Download it anyway?", err=True):
        raise typer.Exit(1)


def _fetch(plan: "DownloadPlan", arrived: Callable[[int], None]) -> Path:
    from gateway.model_files.download import fetch
    from gateway.model_files.hub import HubFailed

    try:
        return fetch(plan, arrived)
    except HubFailed as error:
        raise CommandFailed(f"{error}\nThe partial download is kept: the same command resumes it.") from None
    except KeyboardInterrupt:
        raise CommandFailed("stopped; the same command resumes the download", 130) from None


@contextmanager
def _progress(plan: "DownloadPlan") -> Generator[Callable[[int], None], None, None]:
    """Show a progress bar on stderr if it is a terminal."""
    from rich.progress import TimeRemainingColumn, TransferSpeedColumn

    with progress_bar(TransferSpeedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(plan.repository.id, total=plan.total_bytes, completed=plan.here_bytes)
        yield lambda count: bar.advance(task, count)


@contextmanager
def _progress_lines(plan: "DownloadPlan") -> Generator[Callable[[int], None], None, None]:
    """Print progress as JSON lines on stdout. The daemon runs such a process and shows its progress on the web page."""
    lock, done, printed_at = Lock(), plan.here_bytes, 0.0
    _print_line(done, plan.total_bytes)

    def arrived(count: int) -> None:
        nonlocal done, printed_at
        with lock:
            done += count
            now = time.monotonic()
            if now - printed_at >= PROGRESS_INTERVAL_S:
                printed_at = now
                _print_line(done, plan.total_bytes)

    yield arrived


def _print_line(downloaded_bytes: int, total_bytes: int, **more: str) -> None:
    line = {"downloaded_bytes": downloaded_bytes, "total_bytes": total_bytes} | more
    print(msgspec.json.encode(line).decode(), flush=True)


def _result(pulled: PullResult) -> dict[str, object]:
    plan, found, obstacles, path = pulled
    return {
        "repository": plan.repository.id,
        "revision": plan.repository.revision,
        "commit": plan.repository.commit,
        "path": str(path),
        "files": len(plan.files),
        "size_bytes": plan.total_bytes,
        "downloaded_bytes": plan.missing_bytes,
        "fits": found.fits if found is not None else None,
        "verdict": found.verdict if found is not None else "",
        "obstacles": obstacles,
    }


def _print_next_step(plan: "DownloadPlan", path: Path, took_s: float) -> None:
    """Print the model's folder and how to serve it."""
    if plan.missing_bytes:
        typer.echo(f"{plan.repository.id} is downloaded: {size(plan.missing_bytes)} in {duration(took_s)}")
    else:
        typer.echo(f"{plan.repository.id} is here, whole and of the newest commit {plan.repository.commit[:8]}")
    typer.echo(how_to_serve(plan, path))


def how_to_serve(plan: "DownloadPlan", path: Path) -> str:
    """Return the command to run next."""
    repository = plan.repository
    # A repository's name stands for its main revision; another revision is named by its folder.
    served = repository.id if repository.revision == MAIN else str(path)
    running = running_models()
    if model := next((one for one in running or () if one.path == served), None):
        return f"Load it now: mlxctl load {model.name}"
    config = readable_config()
    next_step = "mlxctl serve" if running is None else "mlxctl config reload"
    if config is not None and any(model.path == served for model in config.models.values()):
        return f"Serve it: {next_step}"
    name = repository.id.rpartition("/")[2].lower()
    file = "mlxd.toml" if config is None else config.config_path
    return f'To serve it, write into {file}:\n\n[models."{name}"]\npath = "{served}"\n\nand then: {next_step}'
