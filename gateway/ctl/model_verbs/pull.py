"""`mlxctl pull`: downloads a model from the Hugging Face hub into the local cache."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
import typer

from gateway.ctl.info import print_info
from gateway.ctl.model_verbs.offline import available_bytes, naming_models_here, readable_config, running_models
from gateway.ctl.printing import Json, print_json, progress_bar
from gateway.ctl.tables import duration, size
from gateway.failed import CommandFailed
from gateway.model_files.hub_cache import MAIN, split_revision
from gateway.model_files.metadata import ModelMetadata

if TYPE_CHECKING:
    from gateway.model_files.download import DownloadPlan

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
