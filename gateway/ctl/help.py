"""Help texts of mlxctl: the verbs in panels, and each text as it stands, since rich takes brackets for markup."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

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
