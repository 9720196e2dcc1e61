"""Configuration, models and memory for verbs that also work without the daemon, and shell completion of model names.

Configuration, models and memory for verbs that also work without the daemon.

Shell completion of model names. It only reads files, so that it is quick and needs no daemon.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.access.key import has_keys
from gateway.command_failed import CommandFailed
from gateway.config.names import Names
from gateway.config.settings import Config, ConfigError, ModelConfig
from gateway.control_types import DaemonStatus, ModelStatus
from gateway.ctl import client
from gateway.errors import ModelNotFound
from gateway.model_files.hub_cache import cached_models
from gateway.model_files.metadata import Unreadable, find
from gateway.state_dir import default_home

GIB: Final = 1 << 30


# A model as the daemon reports it, or as the configuration has it.
ServedModel = ModelStatus | ModelConfig


def read_config(file: Path | None = None, home: Path | None = None) -> Config:
    """Read the configuration file of a home, or another file, as the daemon would read it now. Raises `ConfigError`."""
    from gateway.config.load import load_config

    config = load_config(home or default_home(), file, has_keys=has_keys)
    if any(model.warm for model in config.models.values()):
        # The import of the API takes long, and most files have no warm prompts.
        from gateway.api.openai.warm_prompts import check_warm_prompts

        check_warm_prompts(config)
    return config


def readable_config() -> Config | None:
    """Read the configuration, or return None if it is broken."""
    try:
        return read_config()
    except ConfigError:
        return None


def model_of(config: Config, name: str) -> ModelConfig:
    """Return the configured model of that name, or one made for the folder or repository of that name."""
    try:
        return Names(config.models).locate(name).model
    except ModelNotFound:
        return ModelConfig(name=name, path=name)


def folder_of(path: str) -> Path:
    """Return a model's folder. Raises `Unreadable`, which advises a download only if the path could be a repository's
    name.
    """
    try:
        return find(path)
    except Unreadable:
        if path.startswith((".", "/", "~")):
            raise Unreadable(f"there is no folder {path}") from None
        raise


def daemon() -> DaemonStatus | None:
    """Return the daemon's status; None if it does not run."""
    try:
        return client.status()
    except CommandFailed:
        return None


def served_models() -> Sequence[ServedModel]:
    """Return the models of the daemon, or else those of the configuration. Raises `ConfigError`."""
    running = running_models()
    return running if running is not None else list(read_config().models.values())


@contextmanager
def naming_models_here() -> Generator[None, None, None]:
    """Add to the error of a hub that cannot be reached what runs without it. Raises `CommandFailed`."""
    from gateway.model_files.hub import NoConnection

    try:
        yield
    except NoConnection as error:
        here = " or ".join(f"mlxctl run {model.name}" for model in served_models() if "*" not in model.name)
        raise CommandFailed(f"{error}; without it: {here}" if here else str(error)) from None


def running_models() -> list[ModelStatus] | None:
    """Return the models that the daemon serves; None if it does not run."""
    status = daemon()
    return None if status is None else status.models


def is_running(pid: int) -> bool:
    """Whether the process runs. A zombie process does not count as running."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def budget_bytes(status: DaemonStatus | None) -> int:
    """Return the running daemon's memory budget for all models, or else the budget that a daemon would have."""
    from gateway.workers.memory.host import ThisMachine

    if status is not None and status.memory is not None:
        return status.memory.budget_bytes
    config = readable_config()
    budget = "auto" if config is None else config.memory.budget_bytes
    return ThisMachine().budget() if budget == "auto" else budget


def check_room(model: ModelConfig) -> None:
    """Check that a model can be loaded a second time without making the machine swap. Raises `CommandFailed`."""
    from gateway.workers.memory.estimate import estimate
    from gateway.workers.memory.host import ThisMachine

    weights, free = estimate(model, 0).weights, ThisMachine().available()
    if weights > free:
        raise CommandFailed(
            f"the model is loaded once more for this: its weights take {weights / GIB:.1f} GiB, and {free / GIB:.1f} "
            f"GiB are free. `mlxctl unload {model.name}` before it, or --yes"
        )


def available_bytes() -> int:
    """Return the memory that one model could have if the daemon unloaded all others for it."""
    from gateway.workers.memory.host import ThisMachine

    status = daemon()
    held = status.memory.footprint_bytes if status is not None and status.memory is not None else 0
    return min(budget_bytes(status), ThisMachine().available() + held)


def complete_models(incomplete: str) -> list[str]:
    """Complete names and aliases from the configuration."""
    # A broken file completes nothing: the shell cannot show an error here, and the verb will.
    config = readable_config()
    models = config.models.values() if config is not None else ()
    names = [name for model in models for name in model.names if "*" not in name]
    return [name for name in names if name.startswith(incomplete)]


def complete_downloaded(incomplete: str) -> list[str]:
    """Complete names and aliases of configured models, and repositories in the Hugging Face cache."""
    names = [*complete_models(incomplete), *(name for name in cached_models() if name.startswith(incomplete))]
    return list(dict.fromkeys(names))


def model_argument(
    help: str, metavar: str | None = None, complete: Callable[[str], list[str]] = complete_models
) -> Any:
    """Make a command-line argument that names a model."""
    return typer.Argument(help=help, show_default=False, metavar=metavar, autocompletion=complete)


Model = Annotated[str, model_argument("A model's name or alias.")]
