"""The verbs of `mlxctl`. A verb imports its dependencies itself: `mlxctl version` loads no HTTP client.

Help texts of mlxctl: the verbs in panels, and each text as it stands, since rich takes brackets for markup.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from gateway.control_types import CommandDone, ModelVerb
from gateway.ctl import (
    batches,
    cache,
    chat_verbs,
    client,
    drain,
    hub,
    keys,
    logs,
    models,
    requests,
    tables,
    top,
    ui,
    usage,
)
from gateway.ctl import calibrate as calibrating
from gateway.ctl import config as config_verbs
from gateway.ctl import connect as connecting
from gateway.ctl import connect as launching
from gateway.ctl import models as adapter
from gateway.ctl import service as service
from gateway.ctl import setup as setup
from gateway.ctl.bench import bench_verb as bench
from gateway.ctl.chat_verbs import MaxTokens, System, Temperature
from gateway.ctl.doctor import doctor_verb as inspect
from gateway.ctl.offline import Model, check_room, is_running, model_of, read_config
from gateway.ctl.selftest import selftest_verb as selftest
from gateway.ctl.tables import Anyway, Json, print_json, print_result
from protocol import __version__

HELP_NAMES: Final = ("-h", "--help")
# The root's verbs in the order in which help lists them.
PANELS: Final[Mapping[str, tuple[str, ...]]] = {
    "Start": ("serve", "run", "chat", "decide", "launch", "connect", "ui", "help", "version"),
    "Models": ("models", "search", "recommend", "info", "pull", "rm", "load", "unload", "pin", "unpin", "adapter"),
    "Watch": ("status", "ps", "top", "requests", "batches", "why", "usage", "logs", "doctor", "selftest"),
    "Operate": ("keys", "config", "service", "setup", "restart", "cancel", "drain", "undrain", "cache", "handover"),
    "Expert": ("bench", "calibrate", "verify", "repack", "parse"),
}


def command_of(app: typer.Typer) -> TyperGroup:
    """Return the command line of `app`, whose help lists the verbs of `PANELS` in their order."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    for _, command in (("", group), *nested(group)):
        _show_as_written(command)
    panels = {verb: panel for panel, verbs in PANELS.items() for verb in verbs}
    for verb in panels:
        command = group.commands.pop(verb)
        assert isinstance(command, (TyperCommand, TyperGroup))
        command.rich_help_panel = panels[verb]
        group.commands[verb] = command
    return group


def nested(group: TyperGroup, words: tuple[str, ...] = ()) -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    """Yield every command below a group with the words that are typed for it."""
    for name, command in group.commands.items():
        assert isinstance(command, (TyperCommand, TyperGroup))
        yield " ".join((*words, name)), command
        if isinstance(command, TyperGroup):
            yield from nested(command, (*words, name))


def _show_as_written(command: TyperCommand | TyperGroup) -> None:
    command.help = _escaped(command.help)
    context = command.context_class(command, help_option_names=list(HELP_NAMES))
    for parameter in command.get_params(context):
        shown: Any = parameter
        shown.help = _escaped(shown.help)
        if shown.metavar is None and parameter.param_type_name == "argument":
            shown.metavar = str(parameter.name).upper()
        elif getattr(parameter, "is_flag", False):
            shown.metavar = ""  # a flag takes no value, whose type would be shown


def _escaped(text: str | None) -> str | None:
    return text and text.replace("[", r"\[")


app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP_NAMES)},
)

app.add_typer(adapter.app, name="adapter")
app.add_typer(batches.app, name="batches")
app.add_typer(cache.app, name="cache")
app.add_typer(config_verbs.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(requests.app, name="requests")
app.add_typer(service.app, name="service")
app.add_typer(setup.app, name="setup")


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback()
def mlxctl(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version of mlxctl.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Control mlxd, the serving daemon for MLX models."""


@app.command("help")
def help_of(
    context: typer.Context,
    verb: Annotated[list[str] | None, typer.Argument(help="Words of a verb, such as: keys create.")] = None,
) -> None:
    """Show the help of a verb, or the list of all verbs.

    Example: mlxctl help keys create
    """
    assert context.parent is not None
    context.parent.command.main([*(verb or ()), "--help"], prog_name="mlxctl")


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Option(help="Configuration file instead of mlxd.toml in MLXD_HOME (~/.mlxd).")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port to listen on.")] = None,
    log_level: Annotated[str | None, typer.Option(help="Level of the log: debug, info, warning or error.")] = None,
) -> None:
    """Run the daemon in the foreground, as `mlxd` does.

    Example: mlxctl serve --port 9000
    """
    from gateway.main import run

    raise typer.Exit(run(config, host, port, log_level))


@app.command()
def status(json: Json = False) -> None:
    """Show the daemon, its models, their memory and their queues.

    Example: mlxctl status --json
    """
    daemon = client.status()
    if json:
        print_json(daemon)
        return

    tables.status(daemon)


for verb in (
    logs.logs,
    requests.cancel,
    requests.why,
    calibrating.calibrate,
    connecting.connect,
    launching.launch,
    chat_verbs.decide,
    inspect.doctor,
    bench.bench,
    drain.drain,
    hub.info,
    hub.pull,
    hub.recommend,
    models.repack,
    models.rm,
    chat_verbs.run,
    hub.search,
    selftest.selftest,
    top.top,
    ui.ui,
    drain.undrain,
    usage.usage,
    models.models,
    models.ps,
):
    app.command()(verb)


@app.command()
def chat(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="Prompt to answer before exiting.", show_default=False)] = None,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    json: Annotated[bool, typer.Option("--json", help="Print one answer as JSON, with its reasoning.")] = False,
) -> None:
    """Chat with a model. Without a prompt, hold a conversation, or read the prompt from a pipe.

    Example: mlxctl chat demo "Why is the sky blue?"
    """
    from gateway.ctl import chat_verbs as talking

    client.status()
    talking.talk(model, prompt, talking.ChatOptions(system, max_tokens, temperature), json=json)


def _model_verb(verb: ModelVerb, help: str, state: str = "") -> None:
    """Add a verb that sends a command for one model. `state`, if given, is printed in place of the state that the
    daemon reports.
    """

    def command(model: Model, json: Json = False) -> None:
        done = client.post(f"/v1/models/{verb}", {"model": model}, CommandDone)
        print_result(done, f"{done.model} is {state or done.state}", json)

    app.command(verb, help=f"{help}\n\nExample: mlxctl {verb} coder")(command)


_model_verb("load", "Load a model now, even after failed attempts.")
_model_verb("unload", "Finish a model's running requests, then end its worker. The next request loads the model again.")
_model_verb("restart", "Restart a model's worker. Its streams pause and resume on the new worker.")
_model_verb(
    "pin",
    "Keep a model from being unloaded for another, until the daemon ends or `mlxctl unpin`. Does not load it.",
    "pinned",
)
_model_verb(
    "unpin",
    "Allow a model to be unloaded when another needs its memory, even if the configuration pins it.",
    "no longer pinned",
)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def parse(context: typer.Context) -> None:
    """Print the events that a model family's parser finds in a raw output, as JSON lines.

    Example: mlxctl parse --parser hermes --tools tools.json output.txt
    """
    # The parsers belong to the worker, which mlxctl does not import. The child process answers `--help` too.
    command = [sys.executable, "-P", "-m", "worker.output.parsers.cli", *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


@app.command()
def verify(
    model: Model,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each request.")] = 48,
    kill: Annotated[
        bool, typer.Option("--kill", help="Also kill the daemon's worker of the model during streams.")
    ] = False,
    yes: Anyway = False,
    json: Json = False,
) -> None:
    """Verify that a model generates the same tokens alone, batched, cached, preempted, resumed and with drafts.

    The model is loaded once more, in a process of its own. The exit status is 1 if any token differs.

    Example: mlxctl verify demo
    """
    from gateway.ctl import verify as verifying

    config = read_config()
    configured = model_of(config, model)
    if not yes:
        check_room(configured)
    if not json:
        typer.echo(verifying.HEADER)
    is_good = True
    for check in verifying.checks(config, configured, tokens, kill=kill):
        is_good &= check.is_good
        typer.echo(msgspec.json.encode(check).decode() if json else verifying.row(check))
    if not is_good:
        raise typer.Exit(1)


@app.command(hidden=True)
def handover() -> None:
    """End the daemon once its requests have finished, and leave its workers and models to the next daemon.

    Example: mlxctl handover && mlxctl serve
    """
    pid = client.status().pid
    os.kill(pid, signal.SIGUSR2)
    while is_running(pid):
        time.sleep(0.05)


@app.command()
def version(json: Json = False) -> None:
    """Print the version of mlxctl.

    Example: mlxctl version
    """
    typer.echo(f'{{"version":"{__version__}"}}' if json else f"mlxctl {__version__}")
