"""`mlxctl connect` and `mlxctl launch`: clients that use this mlxd.

Choice of a client's model: the one that the owner wants, the default one, or the best that can do its work.

Address, model and key that a client of this mlxd is given.

A client as a child process of `mlxctl launch`: it has the terminal, and its exit status is the command's.

`mlxctl connect`: prints the configuration of a client for this mlxd, writes it, or undoes what it has written.

`mlxctl launch`: starts a client on a model of this mlxd, for one run.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from msgspec import Struct

from gateway.command_failed import CommandFailed
from gateway.config.address import from_here, is_daemon_url
from gateway.config.settings import url_of
from gateway.ctl import chat_verbs
from gateway.ctl.chat_verbs import running_daemon
from gateway.ctl.offline import (
    ServedModel,
    available_bytes,
    complete_downloaded,
    complete_models,
    daemon,
    naming_models_here,
    read_config,
    served_models,
)
from gateway.ctl.tables import Json, duration, print_json, size
from gateway.media.modalities import modalities
from gateway.model_files.metadata import DEMOS, FactsReader, ModelMetadata, Unreadable, find, inspect
from gateway.state_dir import connected_path, default_home, keys_path, write_private
from protocol.checkpoint import TEXT

if TYPE_CHECKING:
    from gateway.client_setup.clients import Client, Endpoint, Launch, Setup
    from gateway.client_setup.config_edit import WrittenFile
    from gateway.model_files.search import FoundRepository

DEFAULT: Final = "default"
# Templates that show tools to the model read this variable.
_TOOLS: Final = "tools"


class Candidate(Struct, frozen=True):
    """A model on this machine for a client. `reasons` are those against it, as sentences' ends after its name."""

    model: ServedModel
    info: ModelMetadata
    reasons: tuple[str, ...]

    @property
    def is_default(self) -> bool:
        return DEFAULT in self.model.aliases


def named_or_default(models: Sequence[ServedModel], wanted: str | None) -> ServedModel:
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
    real = [model for model in models if model.path not in DEMOS] or models
    return next((model for model in real if DEFAULT in model.aliases), real[0])


def candidates(models: Sequence[ServedModel], client: "Client", available: int) -> list[Candidate]:
    """List the models on this machine that generate text and are no demo, the best for a client first.

    `available` is the memory that one model may have. The owner's default model is the best, then the largest one;
    models with reasons against them come last.
    """
    found: list[Candidate] = []
    for model in models:
        info = _info(model, available)
        if info is None or info.kind != TEXT or model.path in DEMOS:
            continue
        unfit = () if info.fits else (info.verdict,)
        found.append(Candidate(model, info, (*info.obstacles, *unfit, *_shortcomings(model, info, client))))
    return sorted(found, key=lambda each: (bool(each.reasons), not each.is_default, -each.info.weights_bytes))


def shortcomings(model: ServedModel, client: "Client") -> list[str]:
    """List what a model lacks for a client, as far as its files show it."""
    info = _info(model, available_bytes())
    if info is not None:
        return _shortcomings(model, info, client)
    return _context_shortcoming(model.context, client)


def context_of(model: ServedModel) -> int:
    """Return the context length of the loaded or configured model, or else the one in its files; 0 if unknown."""
    if model.context:
        return model.context
    info = _info(model, available_bytes())
    return (info.context or 0) if info is not None else 0


def _shortcomings(model: ServedModel, info: ModelMetadata, client: "Client") -> list[str]:
    found: list[str] = []
    if model.path in DEMOS:
        found.append("is a small model to try mlxd with, which cannot do the work of an agent")
    if client.uses_tools and _TOOLS not in FactsReader().read(model.path).templates:
        found.append("cannot call tools: its chat template shows it none")
    found += _context_shortcoming(model.context or info.context or 0, client)
    if info.tokens_max is not None and info.tokens_max < client.context_min <= (info.context or 0):
        found.append(f"has memory for {info.tokens_max} tokens of context here; it needs {client.context_min}")
    return found


def _context_shortcoming(context: int, client: "Client") -> list[str]:
    if not context or context >= client.context_min:
        return []
    return [f"has a context of {context} tokens; the client needs {client.context_min}"]


def _info(model: ServedModel, available: int) -> ModelMetadata | None:
    try:
        return inspect(find(model.path), "auto", model.context, available)
    except Unreadable:
        return None


KEY_VARIABLE: Final = "MLXD_KEY"


def clients_key() -> str:
    """Return the client's key; empty if mlxd has no keys. Raises `CommandFailed` if it has some and none is given."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    # The key file makes keys mandatory, even when it is empty.
    if not key and keys_path(default_home()).exists():
        raise CommandFailed(
            f"mlxd has API keys: put one of this client into {KEY_VARIABLE}, such as "
            f"export {KEY_VARIABLE}=$(mlxctl keys create NAME)"
        )
    return key


def endpoint_of(model: ServedModel, url: str | None = None) -> "Endpoint":
    """Build the endpoint of the running daemon, or the one that the configuration describes. Raises `CommandFailed`."""
    from gateway.client_setup.clients import DEFAULT_CONTEXT, Endpoint

    status, key = daemon(), clients_key()
    if url and not is_daemon_url(url):
        raise typer.BadParameter("it is mlxd's address, such as http://mac.local:8484", param_hint="--url")
    address = url or from_here(status.url if status is not None else url_of(read_config().server))
    return Endpoint(
        url=address.rstrip("/").removesuffix("/v1"),
        model=model.name,
        context=context_of(model) or DEFAULT_CONTEXT,
        key=key,
        takes_images="image" in modalities(model.path, None),
    )


# The terminal sends these to the client too, which may take Ctrl-C for something else than its end.
_OF_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGHUP)


def run_client(launch: "Launch", arguments: Sequence[str]) -> int:
    """Run a client until it ends and return its exit status, 128 and the number for a signal. Raises `CommandFailed`
    if it cannot be started.
    """
    env = {name: value for name, value in os.environ.items() if name not in launch.removed} | launch.env
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if child is not None and number in _PASSED_ON:
            child.send_signal(number)

    with ExitStack() as restored:
        # A handler instead of SIG_IGN, which the client would inherit.
        for number in (*_OF_TERMINAL, *_PASSED_ON):
            restored.callback(signal.signal, number, signal.signal(number, pass_on))
        try:
            child = subprocess.Popen([launch.program, *launch.arguments, *(arguments or launch.default)], env=env)
        except OSError as error:
            raise CommandFailed(f"{launch.program} cannot be started: {error.strerror}") from None
        status = child.wait()
    return 128 - status if status < 0 else status


def complete_clients(incomplete: str) -> list[str]:
    """Complete names of clients."""
    from gateway.client_setup.clients import CLIENTS

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
    from gateway.client_setup.clients import as_data, canonical, client_of, setup

    kind, name = client_of(client), canonical(client)
    if undo:
        if write or model or url:
            raise typer.BadParameter("it goes with no other option but --json", param_hint="--undo")
        _undo(name, json)
        return
    chosen = named_or_default(served_models(), model)
    wanted = setup(name, endpoint_of(chosen, url))
    if write:
        _warn(chosen, shortcomings(chosen, kind), name)
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
    from gateway.client_setup.config_edit import write

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
    from gateway.client_setup.config_edit import ChangedSince, undo

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
    from gateway.client_setup.config_edit import WrittenFile

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


OFFERED: Final = 3
# A usual line, for the estimate of a download's time.
_MBIT_S: Final = 100


def complete_programs(incomplete: str) -> list[str]:
    """Complete names of clients that can be started."""
    from gateway.client_setup.clients import programs

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
    from gateway.client_setup.clients import canonical, client_of, program_of
    from gateway.client_setup.clients import launch as command_of

    name, kind, program = canonical(client), client_of(client), program_of(client)
    if shutil.which(program) is None:
        raise CommandFailed(f"{program} is not installed, or not in PATH. Install it: {kind.install}")
    clients_key()
    with naming_models_here():
        path = chat_verbs.resolved(model, yes) if model else _best(name, kind)
    with running_daemon(chat_verbs.echo_stderr):
        served = chat_verbs.made_known(path, yes)
        chat_verbs.load(served)
        status = daemon()
        loaded = named_or_default(status.models if status is not None else [], served)
        for shortcoming in shortcomings(loaded, kind):
            typer.secho(f"mlxctl: {loaded.name} {shortcoming}", fg="yellow", err=True)
        typer.echo(f"{program} with {loaded.name}, {loaded.context} tokens of context", err=True)
        with tempfile.TemporaryDirectory(prefix="mlxd-launch-") as folder:
            command = command_of(name, endpoint_of(loaded), Path(folder))
            raise typer.Exit(run_client(command, arguments or ()))


def _best(name: str, client: "Client") -> str:
    """Return the best model on this machine for a client, or one that is downloaded now. Raises `CommandFailed`."""
    found = candidates(served_models(), client, available_bytes())
    if found and not found[0].reasons:
        return found[0].model.name
    for candidate in found:
        typer.echo(f"{candidate.model.name} {'; '.join(candidate.reasons)}", err=True)
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
    return chat_verbs.resolved(offers[int(answer) - 1].repository, yes=False)
