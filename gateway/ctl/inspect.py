"""`mlxctl doctor` and `mlxctl info`: whether this machine will do."""

from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.ctl.say import Json, ask, print_json

if TYPE_CHECKING:
    from gateway.config import ModelConfig

_MARKS: Final = {"ok": "ok  ", "warn": "WARN", "bad": "BAD ", "skip": "-   "}
_COLORS: Final = {"ok": "green", "warn": "yellow", "bad": "red", "skip": "bright_black"}


def doctor(json: Json = False) -> None:
    """Check the machine, the home and the daemon, and say what to do. Exit status 1 when something will not work.

    Example: mlxctl doctor
    """
    from gateway.config import default_home
    from gateway.ctl.doctor import examine, say

    found = list(examine(default_home(), say))
    if json:
        print_json(found)
    else:
        for finding in found:
            typer.secho(_MARKS[finding.level], fg=_COLORS[finding.level], nl=False)
            typer.echo(f" {finding.name}: {finding.text}")
            if finding.advice:
                typer.echo(f"       {finding.advice}")
    if any(finding.level == "bad" for finding in found):
        raise typer.Exit(1)


def info(
    model: Annotated[
        str, typer.Argument(help="A model's name or alias, a folder or a repository.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Say what a model needs and whether it fits this machine now. Exit status 1 if it does not.

    Example: mlxctl info mlx-community/Qwen3-4B-4bit
    """
    import psutil

    from gateway.ctl.client import Failed
    from gateway.ctl.show import size
    from gateway.modelinfo import Info, Unreadable, find, inspect

    def look() -> Info:
        found = _configured(model)
        try:
            return inspect(find(found.path), found.dtype, found.context, psutil.virtual_memory().available)
        except Unreadable as error:
            raise Failed(str(error)) from None

    found = ask(look)
    if json:
        print_json(found)
    else:
        kv = "not computed for this attention" if found.kv_1k_bytes is None else f"{size(found.kv_1k_bytes)} per 1,000"
        typer.echo(f"{model}: {found.model_type}, {found.path}")
        typer.echo(f"weights    {size(found.weights_bytes)} in memory, {size(found.disk_bytes)} on disk")
        typer.echo(f"KV         {kv} tokens" if found.kv_1k_bytes is not None else f"KV         {kv}")
        typer.echo(f"context    {found.context or '?'} tokens")
        typer.echo(f"available  {size(found.available_bytes)}")
        typer.echo(found.verdict)
    if not found.fits:
        raise typer.Exit(1)


def _configured(name: str) -> "ModelConfig":
    """The model of the configuration, or one that could be. Raises `Failed`."""
    from gateway.caller import OWNER
    from gateway.config import ConfigError, ModelConfig, default_home
    from gateway.configread import load_config
    from gateway.ctl.client import Failed
    from gateway.errors import ModelNotFound
    from gateway.routing import Router

    try:
        return Router(load_config(default_home()).models).resolve(name, OWNER)
    except ConfigError as error:
        raise Failed(str(error)) from None
    except ModelNotFound:
        return ModelConfig(name=name, path=name)
