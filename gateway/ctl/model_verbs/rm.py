"""`mlxctl rm`: removes a downloaded model from the Hugging Face cache."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.config.settings import Config
from gateway.ctl.complete import complete_downloaded, model_argument
from gateway.ctl.model_verbs.offline import model_of, read_config, running_models
from gateway.ctl.printing import Json, print_result
from gateway.ctl.tables import size
from gateway.failed import CommandFailed
from gateway.model_files.hub_cache import cache_dir, is_cached, remove, repository_bytes, repository_of
from gateway.model_files.metadata import DEMOS


def rm(
    model: Annotated[str, model_argument("A model's name or alias, or a repository.", complete=complete_downloaded)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove a downloaded model from the disk. A folder of your own is left alone, as is a model that is loaded.

    Example: mlxctl rm mlx-community/Qwen3-4B-4bit --yes
    """
    config = read_config()
    repository = _find(config, model)
    _refuse_loaded(repository)
    held = repository_bytes(repository)
    if not yes:
        if not sys.stdin.isatty():
            raise CommandFailed(f"{repository} holds {size(held)}; --yes removes it")
        typer.confirm(f"Remove {repository}, {size(held)}?", abort=True, err=True)
    freed = remove(repository)
    print_result(
        {"repository": repository, "freed_bytes": freed}, f"{repository} is removed: {size(freed)} are free again", json
    )
    # The configuration is read again: a model that was in it only because it was in the cache is no longer in it.
    if not json and (named := [one.name for one in read_config().models.values() if one.path == repository]):
        typer.echo(f"{config.config_path} still has it as {', '.join(named)}", err=True)


def _find(config: Config, name: str) -> str:
    """Return the repository that a name stands for, which must be in the cache. Raises `CommandFailed`."""
    path = model_of(config, name).path
    if path in DEMOS:
        raise CommandFailed("the demo models are part of mlxd and cannot be removed")
    if repository := _repository(path):
        if not is_cached(repository):
            raise CommandFailed(f"{repository} is not in the Hugging Face cache ({cache_dir()})")
        return repository
    if Path(path).expanduser().is_dir():
        raise CommandFailed(f"{path} is a folder outside of the Hugging Face cache, which mlxctl leaves alone")
    raise CommandFailed(f"there is no model {name}")


def _repository(path: str) -> str | None:
    """Return the repository of a model's path. The path is the repository's name or the folder of a snapshot."""
    folder, hub = Path(path).expanduser(), cache_dir()
    if folder.is_relative_to(hub) and folder != hub:
        return repository_of(folder.relative_to(hub).parts[0])
    is_name = not path.startswith((".", "/", "~")) and path.count("/") <= 1
    return path if is_name and not folder.is_dir() else None


def _refuse_loaded(repository: str) -> None:
    """Check that the repository is not loaded. Its files are mapped, and a restart reads them again. Raises
    `CommandFailed`.
    """
    for model in running_models() or ():
        if model.pid and _repository(model.path) == repository:
            raise CommandFailed(f"{repository} is loaded as {model.name}; first: mlxctl unload {model.name}")
