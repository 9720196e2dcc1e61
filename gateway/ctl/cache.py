"""`mlxctl cache`: the prefix cache on disk. Works on the files, whether the daemon runs or not."""

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.ctl.complete import complete_models
from gateway.ctl.local import console, read_config
from gateway.ctl.say import Json, ask, print_json

if TYPE_CHECKING:
    from gateway.config import Config

app = typer.Typer(help="Show and empty the prefix cache on disk.", no_args_is_help=True)


@app.command()
def stats(json: Json = False) -> None:
    """Show what the prefix cache holds on disk, by model.

    Example: mlxctl cache stats
    """
    import time

    from gateway.ctl import show
    from gateway.prefixcache import measure

    config = ask(read_config)
    folders = measure(config.prefix_cache_dir)
    if json:
        print_json({"folder": str(config.prefix_cache_dir), "cap_bytes": config.prefix_cache_bytes, "models": folders})
        return
    total, cap = sum(folder.size_bytes for folder in folders), config.prefix_cache_bytes
    typer.echo(f"{config.prefix_cache_dir}: {show.size(total)} of {show.size(cap)}")
    if folders:
        show.cache(folders, time.time(), console())


@app.command()
def clear(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Only what was kept for this model.",
            show_default=False,
            metavar="MODEL",
            autocompletion=complete_models,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Delete the prefix cache on disk, also while models run: they compute anew what is gone.

    Example: mlxctl cache clear coder
    """
    from gateway.ctl import show
    from gateway.prefixcache import clear as delete

    config = ask(read_config)
    path = None if model is None else ask(lambda: _path(config, model))
    cleared = delete(config.prefix_cache_dir, path)
    if json:
        print_json(cleared)
    else:
        typer.echo(f"deleted {cleared.files} files, {show.size(cleared.size_bytes)}")


def _path(config: "Config", name: str) -> str:
    from gateway.caller import OWNER
    from gateway.ctl.client import Failed
    from gateway.errors import ModelNotFound
    from gateway.routing import Router

    try:
        return Router(config.models).resolve(name, OWNER).path
    except ModelNotFound as error:
        raise Failed(str(error)) from None
