"""`mlxctl connect`: prints the configuration of a client for this mlxd, writes it, or undoes what it has written."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gateway.ctl.complete import complete_models
from gateway.ctl.connect import model_choice
from gateway.ctl.connect.endpoint import endpoint_of
from gateway.ctl.model_verbs.offline import ServedModel, served_models
from gateway.ctl.printing import Json, print_json
from gateway.failed import CommandFailed
from gateway.state_dir.home_paths import connected_path, default_home
from gateway.state_dir.private_file import write_private

if TYPE_CHECKING:
    from gateway.client_setup.client_setups import Setup
    from gateway.client_setup.config_write import WrittenFile


def complete_clients(incomplete: str) -> list[str]:
    """Complete names of clients."""
    from gateway.client_setup.client_setups import CLIENTS

    return [name for name in CLIENTS if name.startswith(incomplete)]


def connect(
    client: Annotated[
        str,
        typer.Argument(
            help="claude, codex, opencode, aider, pi, continue, qwen, goose, zed, llm or cursor.",
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
    undo: Annotated[
        bool, typer.Option("--undo", help="Make the client's files what they were before --write.")
    ] = False,
    json: Json = False,
) -> None:
    """Print the configuration of a client for this mlxd, or write it. Other settings in its files stay.

    Where mlxd has API keys, the client's is taken from the variable MLXD_KEY. For one run without a trace: mlxctl
    launch.

    Example: mlxctl connect codex --write
    """
    from gateway.client_setup.client_setups import as_data, canonical, client_of, setup

    kind, name = client_of(client), canonical(client)
    if undo:
        if write or model or url:
            raise typer.BadParameter("it goes with no other option but --json", param_hint="--undo")
        _undo(name, json)
        return
    chosen = model_choice.named_or_default(served_models(), model)
    wanted = setup(name, endpoint_of(chosen, url))
    if write:
        _warn(chosen, model_choice.shortcomings(chosen, kind), name)
        _write(wanted, json)
    elif json:
        print_json(as_data(wanted))
    else:
        for edit in wanted.edits:
            typer.echo(f"{edit.path}:\n\n{edit.fragment()}")
        _print_command(wanted)


def _warn(model: ServedModel, shortcomings: list[str], client: str) -> None:
    """Warn of a model that will disappoint, for all sessions of the client."""
    for shortcoming in shortcomings:
        typer.secho(f"mlxctl: {model.name} {shortcoming}", fg="yellow", err=True)
    if shortcomings:
        typer.echo(f"mlxctl recommend lists other models; mlxctl connect {client} --undo takes it back", err=True)


def _write(setup: "Setup", json: bool) -> None:
    from gateway.client_setup.config_write import write

    if not setup.edits:
        raise CommandFailed(f"{setup.client} is configured by hand: mlxctl connect {setup.client} prints what to enter")
    done: list[WrittenFile] = []
    for edit in setup.edits:
        done.append(write(edit))
        # After each file, so that a later one that cannot be written leaves no file that `--undo` does not know.
        _remember(setup.client, done[-1:])
    if json:
        print_json(
            {"client": setup.client, "files": [_shown(file) for file in done]}
            | {"command": setup.command, "note": setup.note}
        )
        return
    for file in done:
        kept = f"; before: {file.backup}" if file.backup else ""
        typer.echo(f"{file.path} has it already" if file.is_unchanged else f"{file.path} is written{kept}")
    _print_command(setup)


def _undo(client: str, json: bool) -> None:
    """Undo the writes for a client, the newest first, and forget those that are undone. Raises `CommandFailed` if a
    file was changed since.
    """
    from gateway.client_setup.config_write import ChangedSince, undo

    left = _written(client)
    if not left:
        raise CommandFailed(f"mlxctl connect has written nothing for {client} here")
    restored: list[str] = []
    refusals: dict[str, str] = {}
    for file in reversed(left.copy()):
        if file.path in refusals:
            continue
        try:
            undo(file)
        except ChangedSince as error:
            refusals[file.path] = str(error)
        else:
            left.remove(file)
            _save(client, left)
            restored.append(file.path)
    paths = list(dict.fromkeys(restored))
    if json:
        print_json({"client": client, "restored": paths, "changed_since": list(refusals.values())})
    else:
        for path in paths:
            before = " before the last --write" if path in refusals else ""
            typer.echo(f"{path} is as it was{before}" if Path(path).exists() else f"{path} is removed, as it was new")
    if refusals:
        raise CommandFailed("\n".join(refusals.values()))


def _shown(file: "WrittenFile") -> dict[str, object]:
    return {"path": file.path, "backup": file.backup, "is_unchanged": file.is_unchanged}


def _written(client: str) -> "list[WrittenFile]":
    """Read what was written for a client, the oldest first. Raises `CommandFailed`."""
    from gateway.client_setup.config_write import WrittenFile

    path = connected_path(default_home(), client)
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[WrittenFile])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise CommandFailed(f"{path} cannot be read: {error}") from None


def _remember(client: str, done: "list[WrittenFile]") -> None:
    if new := [file for file in done if not file.is_unchanged]:
        _save(client, [*_written(client), *new])


def _save(client: str, files: "list[WrittenFile]") -> None:
    path = connected_path(default_home(), client)
    try:
        if files:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, msgspec.json.encode(files))
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from None


def _print_command(setup: "Setup") -> None:
    if setup.command:
        typer.echo(f"Start it: {setup.command}")
    if setup.note:
        typer.echo(setup.note)
