"""`mlxctl cache`: the prefix cache on disk. It reads the files directly, with or without a running daemon."""

import time
from typing import Annotated

import typer

from gateway.command_failed import CommandFailed
from gateway.config.names import Names
from gateway.config.settings import Config
from gateway.ctl import tables
from gateway.ctl.offline import model_argument, read_config
from gateway.ctl.tables import Json, print_json, print_result
from gateway.errors import ModelNotFound
from gateway.model_files.prefix_files import clear as delete
from gateway.model_files.prefix_files import measure

app = typer.Typer(help="Show and clear the prefix cache on disk.", no_args_is_help=True)


@app.command()
def stats(json: Json = False) -> None:
    """Show the prefix cache on disk, by model.

    Example: mlxctl cache stats
    """
    config = read_config()
    folders = measure(config.prefix_cache_dir)
    if json:
        print_json({"folder": str(config.prefix_cache_dir), "cap_bytes": config.prefix_cache_bytes, "models": folders})
        return
    total, cap = sum(folder.size_bytes for folder in folders), config.prefix_cache_bytes
    typer.echo(f"{config.prefix_cache_dir}: {tables.size(total)} of {tables.size(cap)}")
    if folders:
        tables.cache(folders, time.time())


@app.command()
def clear(
    model: Annotated[str | None, model_argument("Only what was kept for this model.", "MODEL")] = None,
    json: Json = False,
) -> None:
    """Delete the prefix cache on disk, also while models run: they compute the prefixes again.

    Example: mlxctl cache clear coder
    """
    config = read_config()
    cleared = delete(config.prefix_cache_dir, None if model is None else _path(config, model))
    print_result(cleared, f"deleted {cleared.files} files, {tables.size(cleared.size_bytes)}", json)


def _path(config: Config, name: str) -> str:
    try:
        return Names(config.models).locate(name).model.path
    except ModelNotFound as error:
        raise CommandFailed(str(error)) from None
