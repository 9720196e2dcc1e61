from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup

from gateway.ctl.cli import PANELS, app, command_of, nested
from tests.support.ctl import ctl


def commands(group: TyperGroup) -> list[tuple[str, TyperCommand | TyperGroup]]:
    """Every command that does something: what is typed for it, and what it is."""
    return [
        (words, command)
        for words, command in nested(group)
        if not isinstance(command, TyperGroup) or command.invoke_without_command
    ]


def root() -> TyperGroup:
    return command_of(app)


HELPS = {verb: command.help or "" for verb, command in commands(root())}


@pytest.mark.parametrize("verb", HELPS)
def test_every_verb_says_in_a_line_what_it_does_and_shows_an_example_of_itself(verb: str) -> None:
    text = HELPS[verb]
    assert text.splitlines()[0].endswith("."), text
    last = verb.split()[-1]
    example = text.partition("Example: ")[2]
    assert "mlxctl " in example
    assert last in example.split()


def test_every_verb_is_in_one_panel() -> None:
    listed = [verb for verbs in PANELS.values() for verb in verbs]

    assert sorted(listed) == sorted(root().commands)


def test_help_shows_brackets_and_no_type_of_flags(tmp_path: Path) -> None:
    shown = ctl(tmp_path, "help", "drain").stdout

    assert "[server]" in shown
    assert "<bool>" not in shown


def test_the_help_of_a_verb_of_a_group_is_that_of_its_option(tmp_path: Path) -> None:
    assert ctl(tmp_path, "help", "keys", "create").stdout == ctl(tmp_path, "keys", "create", "-h").stdout


def test_the_version_is_an_option_too(tmp_path: Path) -> None:
    assert ctl(tmp_path, "--version").stdout == ctl(tmp_path, "version").stdout
