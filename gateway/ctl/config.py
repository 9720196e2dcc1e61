"""`mlxctl config`: checks and prints the configuration file, and has the daemon reload it."""

from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec import structs

from gateway.command_failed import CommandFailed
from gateway.config import export
from gateway.config.settings import Config, ConfigError
from gateway.control_types import ReloadResult
from gateway.ctl.client import post
from gateway.ctl.offline import folder_of, read_config
from gateway.ctl.tables import Json, print_json
from gateway.model_files.metadata import Unreadable

BAD_CONFIG: Final = 2

app = typer.Typer(help="Check and show the configuration.", no_args_is_help=True)

File = Annotated[
    Path | None,
    typer.Argument(
        help="Configuration file instead of mlxd.toml in MLXD_HOME (~/.mlxd).", show_default=False, metavar="FILE"
    ),
]


@app.command()
def check(file: File = None, json: Json = False) -> None:
    """Check a configuration file without starting the daemon; exit status 2 and the line of the error if it is invalid.

    Example: mlxctl config check mlxd.toml
    """
    try:
        config = read_config(file)
    except ConfigError as error:
        if not json:
            raise CommandFailed(str(error), BAD_CONFIG) from None
        print_json({"ok": False, "file": str(error.path or ""), "line": error.line, "error": str(error)})
        raise typer.Exit(BAD_CONFIG) from None
    absent = _absent(config)
    if json:
        print_json({"ok": True, "file": str(config.config_path), "models": list(config.models), "absent": absent})
        return
    # Only the default file may be missing.
    source = config.config_path if config.config_path.exists() else f"no {config.config_path}: the defaults"
    count = len(config.models)
    typer.echo(f"{source}: good, {count} model{'' if count == 1 else 's'}")
    for name, why in absent.items():
        typer.echo(f"not here yet: {name}: {why}", err=True)


@app.command()
def show(file: File = None, json: Json = False) -> None:
    """Print the configuration as the daemon would use it, every default filled in.

    Example: mlxctl config show
    """
    try:
        config = read_config(file)
    except ConfigError as error:
        raise CommandFailed(str(error), BAD_CONFIG) from None
    if json:
        print_json(export.to_json(config))
    else:
        typer.echo(export.to_toml(config), nl=False)


@app.command()
def reload(json: Json = False) -> None:
    """Reload the configuration file and apply its changes. If it is invalid, nothing changes; exit status 1.

    Streams of a restarted model pause and resume; a removed model finishes its streams first.

    Example: mlxctl config reload
    """
    done = post("/v1/config/reload", {}, ReloadResult)
    if json:
        print_json(done)
        return
    changes = [(what.replace("_", " "), name) for what, names in structs.asdict(done).items() for name in names]
    for what, name in changes or [("unchanged", "")]:
        typer.echo(f"{what:<14} {name}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the file, for editors that check TOML.

    Example: mlxctl config schema > mlxd.schema.json
    """
    print_json(export.schema())


def _absent(config: Config) -> dict[str, str]:
    """Return the models that are not on this machine, each with the reason.

    An absent model is no error, because it can be pulled before its first request.
    """
    absent: dict[str, str] = {}
    for name, model in config.models.items():
        try:
            folder_of(model.path)
        except Unreadable as error:
            absent[name] = str(error)
    return absent
