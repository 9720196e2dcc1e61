"""`mlxctl connect`: prints the configuration of a client for this mlxd, or writes it."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.config.address import from_here, is_daemon_url
from gateway.config.settings import url_of
from gateway.ctl.complete import complete_models
from gateway.ctl.model_verbs.offline import ServedModel, available_bytes, daemon, read_config, served_models
from gateway.ctl.printing import Json, print_json
from gateway.failed import CommandFailed
from gateway.media.modalities import modalities
from gateway.model_files.metadata import Unreadable, find, inspect
from gateway.state_dir.home_paths import default_home, keys_path

if TYPE_CHECKING:
    from gateway.client_setup.client_setups import Endpoint, Setup

KEY_VARIABLE: Final = "MLXD_KEY"
_DEMOS: Final = ("demo", "demo-vision")


def complete_clients(incomplete: str) -> list[str]:
    """Complete names of clients."""
    from gateway.client_setup.client_setups import CLIENTS

    return [name for name in CLIENTS if name.startswith(incomplete)]


def connect(
    client: Annotated[
        str,
        typer.Argument(
            help="claude, codex, opencode, aider, pi, continue, qwen or llm.",
            autocompletion=complete_clients,
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Model for the client; by default the one with the alias `default`, or the first that is no demo.",
            autocompletion=complete_models,
            show_default=False,
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Address of mlxd, if the client runs on another machine.")] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write it into the client's files; what they were is kept beside them.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the configuration of a client for this mlxd, or write it. Other settings in its files stay.

    Where mlxd has API keys, the client's is taken from the variable MLXD_KEY.

    Example: mlxctl connect codex --write
    """
    from gateway.client_setup.client_setups import as_data, setup

    wanted = setup(client, _endpoint(model, url))
    if write:
        _write(wanted, json)
    elif json:
        print_json(as_data(wanted))
    else:
        for edit in wanted.edits:
            typer.echo(f"{edit.path}:\n\n{edit.fragment()}")
        _print_command(wanted)


def _write(setup: "Setup", json: bool) -> None:
    from gateway.client_setup.config_write import write

    done = [write(edit) for edit in setup.edits]
    if json:
        print_json({"client": setup.client, "files": done, "command": setup.command, "note": setup.note})
        return
    for file in done:
        kept = f"; before: {file.backup}" if file.backup else ""
        typer.echo(f"{file.path} has it already" if file.is_unchanged else f"{file.path} is written{kept}")
    _print_command(setup)


def _print_command(setup: "Setup") -> None:
    typer.echo(f"Start it: {setup.command}")
    if setup.note:
        typer.echo(setup.note)


def _endpoint(model: str | None, url: str | None) -> "Endpoint":
    """Build the endpoint of the running daemon, or the one that the configuration describes. Raises `CommandFailed`."""
    from gateway.client_setup.client_setups import DEFAULT_CONTEXT, Endpoint

    status = daemon()
    chosen = _chosen(served_models(), model)
    key = os.environ.get(KEY_VARIABLE, "").strip()
    # The key file makes keys mandatory, even when it is empty.
    if not key and keys_path(default_home()).exists():
        raise CommandFailed(
            f"mlxd has API keys: put one of this client into {KEY_VARIABLE}, such as "
            f"export {KEY_VARIABLE}=$(mlxctl keys create NAME)"
        )
    if url and not is_daemon_url(url):
        raise typer.BadParameter("it is mlxd's address, such as http://mac.local:8484", param_hint="--url")
    address = url or from_here(status.url if status is not None else url_of(read_config().server))
    return Endpoint(
        url=address.rstrip("/").removesuffix("/v1"),
        model=chosen.name,
        context=_context(chosen) or DEFAULT_CONTEXT,
        key=key,
        takes_images="image" in modalities(chosen.path, None),
    )


def _chosen(models: Sequence[ServedModel], wanted: str | None) -> ServedModel:
    """Return the wanted model, or else the default one. Raises `CommandFailed`."""
    if wanted is not None:
        for model in models:
            if wanted in (model.name, *model.aliases):
                return model
        names = ", ".join(model.name for model in models)
        raise CommandFailed(f"there is no model {wanted!r}; models here: {names or 'none'}")
    if not models:
        raise CommandFailed("no model is configured or downloaded: mlxctl recommend lists some that fit")
    # The demo has the alias `default` if there is no configuration, even if other models are downloaded.
    real = [model for model in models if model.name not in _DEMOS] or models
    return next((model for model in real if "default" in model.aliases), real[0])


def _context(model: ServedModel) -> int:
    """Return the context length of the loaded or configured model, or else the one in its files; 0 if unknown."""
    if model.context:
        return model.context
    try:
        return inspect(find(model.path), "auto", 0, available_bytes()).context or 0
    except Unreadable:
        return 0
