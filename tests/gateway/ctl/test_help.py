from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from gateway.ctl.cli import app


def commands(group: TyperGroup, words: tuple[str, ...] = ()) -> Iterator[tuple[str, TyperCommand | TyperGroup]]:
    """Every command that does something: what is typed for it, and what it is."""
    for name, command in group.commands.items():
        if not isinstance(command, TyperGroup):
            yield " ".join((*words, name)), command
            continue
        if command.invoke_without_command:
            yield " ".join((*words, name)), command
        yield from commands(command, (*words, name))


def root() -> TyperGroup:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command


HELPS = {verb: command.help or "" for verb, command in commands(root())}


@pytest.mark.parametrize("verb", HELPS)
def test_every_verb_says_in_a_line_what_it_does_and_shows_an_example_of_itself(verb: str) -> None:
    text = HELPS[verb]
    assert text.splitlines()[0].endswith("."), text
    last = verb.split()[-1]
    example = text.partition("Example: ")[2]
    assert "mlxctl " in example
    assert last in example.split()
