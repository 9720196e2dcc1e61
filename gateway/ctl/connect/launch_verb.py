"""`mlxctl launch`: starts a client on a model of this mlxd, for one run."""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.ctl.complete import complete_downloaded
from gateway.ctl.connect import child, model_choice
from gateway.ctl.connect.endpoint import clients_key, endpoint_of
from gateway.ctl.model_verbs.offline import available_bytes, daemon, naming_models_here, served_models
from gateway.ctl.tables import duration, size
from gateway.ctl.talk import ready_model
from gateway.ctl.talk.temporary_daemon import running_daemon
from gateway.failed import CommandFailed

if TYPE_CHECKING:
    from gateway.client_setup.client_setups import Client
    from gateway.model_files.search import FoundRepository

OFFERED: Final = 3
# A usual line, for the estimate of a download's time.
_MBIT_S: Final = 100


def complete_programs(incomplete: str) -> list[str]:
    """Complete names of clients that can be started."""
    from gateway.client_setup.client_launches import programs

    return [name for name in programs() if name.startswith(incomplete)]


def launch(
    client: Annotated[
        str,
        typer.Argument(
            help="claude, codex, opencode, aider, pi, qwen, goose, continue or zed.",
            autocompletion=complete_programs,
            show_default=False,
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments for the client.", metavar="ARGS...", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model, as for `mlxctl run`. Default: the one with the alias `default`, or the largest that suits.",
            autocompletion=complete_downloaded,
            show_default=False,
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", "-y", help="Do not ask before downloading what does not fit, or writing to mlxd.toml."),
    ] = False,
) -> None:
    """Start a client on a model of this mlxd. Its own files stay as they are, and the exit status is the client's.

    The model is loaded first. Where no daemon runs, one is started, which ends with the client. Where mlxd has API
    keys, the client's is taken from the variable MLXD_KEY.

    Example: mlxctl launch claude -- -p "Explain this folder"
    """
    from gateway.client_setup.client_launches import launch as command_of
    from gateway.client_setup.client_launches import program_of
    from gateway.client_setup.client_setups import canonical, client_of

    name, kind, program = canonical(client), client_of(client), program_of(client)
    if shutil.which(program) is None:
        raise CommandFailed(f"{program} is not installed, or not in PATH. Install it: {kind.install}")
    clients_key()
    with naming_models_here():
        path = ready_model.resolved(model, yes) if model else _best(name, kind)
    with running_daemon(ready_model.echo_stderr):
        served = ready_model.made_known(path, yes)
        ready_model.load(served)
        status = daemon()
        loaded = model_choice.named_or_default(status.models if status is not None else [], served)
        for shortcoming in model_choice.shortcomings(loaded, kind):
            typer.secho(f"mlxctl: {loaded.name} {shortcoming}", fg="yellow", err=True)
        typer.echo(f"{program} with {loaded.name}, {loaded.context} tokens of context", err=True)
        with tempfile.TemporaryDirectory(prefix="mlxd-launch-") as folder:
            command = command_of(name, endpoint_of(loaded), Path(folder))
            raise typer.Exit(child.run(command, arguments or ()))


def _best(name: str, client: "Client") -> str:
    """Return the best model on this machine for a client, or one that is downloaded now. Raises `CommandFailed`."""
    found = model_choice.candidates(served_models(), client, available_bytes())
    if found and not found[0].objections:
        return found[0].model.name
    for candidate in found:
        typer.echo(f"{candidate.model.name} {'; '.join(candidate.objections)}", err=True)
    if not found:
        typer.echo("There is only the demo here, which cannot do the work of an agent.", err=True)
    return _download(name, _offers(client))


def _offers(client: "Client") -> "list[FoundRepository]":
    """List models to download that fit this machine and can do a client's work, the most capable first."""
    from gateway.model_files.search import recommend

    recommended = recommend(available_bytes()).candidates
    return [
        model
        for model in recommended
        # Those with a purpose are of mlxd's own list, whose models call tools.
        if model.purpose and model.info is not None and (model.info.context or 0) >= client.context_min
    ][:OFFERED]


def _download(name: str, offers: "Sequence[FoundRepository]") -> str:
    """Ask which model to download, and download it. Raises `CommandFailed` if nobody can be asked."""
    if not offers:
        raise CommandFailed("no model of mlxd's list fits this machine; mlxctl search WORDS finds others")
    typer.echo(f"These fit this machine (times at {_MBIT_S} Mbit/s):", err=True)
    for number, model in enumerate(offers, 1):
        disk_bytes = model.info.disk_bytes if model.info is not None else 0
        takes = duration(disk_bytes * 8 / (_MBIT_S * 1e6))
        typer.echo(f"  {number}  {model.repository}  {size(disk_bytes)}, {takes}: {model.purpose}", err=True)
    if not sys.stdin.isatty():
        raise CommandFailed(f"no model here suits {name}: mlxctl launch {name} --model {offers[0].repository}")
    answer = typer.prompt("Download which one? Its number, or Enter for none", default="", show_default=False, err=True)
    if not answer.strip():
        raise typer.Exit(1)
    if answer.strip() not in map(str, range(1, len(offers) + 1)):
        raise CommandFailed(f"{answer.strip()!r} is none of them")
    return ready_model.resolved(offers[int(answer) - 1].repository, yes=False)
