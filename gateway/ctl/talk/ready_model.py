"""A model made ready for a conversation: found or downloaded, made known to the daemon, and loaded."""

import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from gateway.config.settings import ConfigError
from gateway.control_types import CommandDone, ModelStatus, ReloadResult
from gateway.ctl import client
from gateway.ctl.info import is_repository, print_info
from gateway.ctl.model_verbs.offline import ServedModel, available_bytes, folder_of, read_config, served_models
from gateway.ctl.model_verbs.pull import download
from gateway.ctl.printing import progress_bar
from gateway.failed import CommandFailed
from gateway.model_files.hub_cache import MAIN, cached_models, split_revision
from gateway.model_files.metadata import Unreadable, inspect

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SUGGESTED: Final = 5
_POLL_S: Final = 0.2


def resolved(name: str, yes: bool) -> str:
    """Return the path of a model on this machine, or the name of a model that the daemon serves. Raises
    `CommandFailed`.
    """
    if name.startswith((".", "/", "~")) and _served(name) is None:
        return str(_checked_folder(name, yes))
    if _served(name) is None and not is_repository(name):
        name = _known_here(name) or _searched(name)
    if (served := _served(name)) is None:
        return _downloaded(name, yes)
    if not _is_here(served.path) and is_repository(served.path):
        _downloaded(served.path, yes)
    return served.name


def _known_here(word: str) -> str | None:
    """Return the served or downloaded repository whose name ends with `word`, if there is exactly one. Does not ask the
    hub.
    """
    paths = {model.path for model in served_models()} | set(cached_models())
    found = [path for path in paths if path.rpartition("/")[2].lower() == word.lower()]
    return found[0] if len(found) == 1 else None


def _served(model: str) -> ServedModel | None:
    """Return the model with that name, alias or path, as the daemon serves it or would serve it."""
    models = served_models()
    return next((served for served in models if model in (served.name, served.path, *served.aliases)), None)


def _is_here(path: str) -> bool:
    try:
        return folder_of(path).is_dir()
    except Unreadable:
        return False


def _checked_folder(name: str, yes: bool) -> Path:
    """Return the folder of a model and check that the model fits. Raises `CommandFailed`."""
    try:
        folder = folder_of(name)
        info = inspect(folder, "auto", 0, available_bytes())
    except Unreadable as error:
        raise CommandFailed(str(error)) from None
    print_info(name, info, echo_stderr)
    if not info.fits and not yes:
        raise CommandFailed(f"{name} {info.verdict}; --yes tries it anyway")
    return folder


def _searched(word: str) -> str:
    """Search the hub for the repository whose name ends with `word`. Raises `CommandFailed` with similar names."""
    from gateway.model_files.search import search

    found = [model.repository for model in search([word], available_bytes()) if model.is_usable]
    for repository in found:
        if repository.rpartition("/")[2].lower() == word.lower():
            return repository
    near = ", ".join(found[:_SUGGESTED])
    raise CommandFailed(f"there is no model {word!r} here{f'; the hub has {near}' if near else ' or on the hub'}")


def _downloaded(name: str, yes: bool) -> str:
    """Download a repository and return its name, or the folder of a revision. Raises `CommandFailed`."""
    repository, revision = split_revision(name)
    if revision == MAIN and repository in cached_models():
        _checked_folder(repository, yes)
        return repository
    pulled = download(name, None, yes, echo_stderr)
    return repository if revision == MAIN else str(pulled.path)


def made_known(path: str, yes: bool) -> str:
    """Return the name under which the daemon serves `path`. Adds it to the configuration if needed. Raises
    `CommandFailed`.
    """
    if (served := _served(path)) is not None:
        return served.name
    # The daemon serves all downloaded models if none is configured, and a reload finds the new one.
    client.post("/v1/config/reload", {}, ReloadResult)
    if (served := _served(path)) is not None:
        return served.name
    name = _add_table(client.status().config_path, path, _agreed if not yes else lambda _: None)
    client.post("/v1/config/reload", {}, ReloadResult)
    return name


def _agreed(question: str) -> None:
    """Ask the user to confirm. Exits if the user declines. Raises `CommandFailed` if there is no terminal."""
    if not sys.stdin.isatty():
        raise CommandFailed(f"{question} Not without --yes.")
    if not typer.confirm(question, default=True, err=True):
        raise typer.Exit(1)


def echo_stderr(line: str) -> None:
    """Print a line to stderr, because stdout carries the answer."""
    typer.echo(line, err=True)


def _add_table(config_path: str, path: str, agree: Callable[[str], None]) -> str:
    """Append `[models.NAME]` for a path and return the name. The old file is kept as `.bak`. Raises `CommandFailed`.

    `agree` is called before the file is written; by raising, it prevents the write.
    """
    file = Path(config_path)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    name = _free_name(path, read_config(file if file.exists() else None).models)
    # Every JSON string is a valid TOML string.
    table = f"[models.{dumps(name)}]\npath = {dumps(path)}\n"
    agree(f"{file} names the models that are served. Add {name} to it?")
    kept = file.with_name(f"{file.name}.bak")
    try:
        kept.write_text(before, encoding="utf-8")
        kept.chmod(0o600)
        with file.open("a", encoding="utf-8") as out:
            out.write(("" if not before or before.endswith("\n") else "\n") + ("\n" if before else "") + table)
        read_config(file)
    except ConfigError as error:
        file.write_text(before, encoding="utf-8")
        raise CommandFailed(f"{file} would be invalid with {name} ({error}); it is as it was") from None
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror}") from None
    return name


def _free_name(path: str, taken: Collection[str]) -> str:
    """Return the path's last part in lower case, with a number appended if another model has that name."""
    base = split_revision(path)[0].rstrip("/").rpartition("/")[2].lower()
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name


def load(model: str) -> None:
    """Load a model, with a progress bar for people, and return when it is ready. Raises `CommandFailed`."""
    from rich.progress import TimeElapsedColumn

    with progress_bar(TimeElapsedColumn()) as bar:
        task = bar.add_task(f"loading {model}", total=None)
        done = _start_load(model)
        while not wait([done], _POLL_S).done:
            if not bar.disable:
                _show_progress(bar, task, model)
        done.result()


def _start_load(model: str) -> Future[CommandDone]:
    """Send the load command from a daemon thread, so that Ctrl-C does not wait for it. The load continues in the
    daemon.
    """
    done: Future[CommandDone] = Future()

    def ask() -> None:
        try:
            done.set_result(client.post("/v1/models/load", {"model": model}, CommandDone))
        except Exception as error:  # The reader of the future raises the error.
            done.set_exception(error)

    threading.Thread(target=ask, name="load", daemon=True).start()
    return done


def _show_progress(bar: "Progress", task: "TaskID", model: str) -> None:
    status = next((one for one in client.status().models if one.name == model), None)
    if status is not None:
        bar.update(
            task, description=_progress_text(status), total=status.total_bytes or None, completed=status.loaded_bytes
        )


def _progress_text(model: ModelStatus) -> str:
    if model.is_waiting:
        return f"{model.name} waits for memory"
    return f"{model.stage or model.state} {model.name}"
