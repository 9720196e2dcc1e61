from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup

from gateway.ctl.cli import app


def helps(group: TyperGroup, words: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Every command that does something: what is typed for it, and its help."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from helps(command, (*words, name))
        else:
            yield " ".join((*words, name)), command.help or ""


def root() -> TyperGroup:
    command = typer.main.get_command(app)
    assert isinstance(command, TyperGroup)
    return command


HELPS = dict(helps(root()))


@pytest.mark.parametrize("verb", HELPS)
def test_every_verb_says_in_a_line_what_it_does_and_shows_an_example_of_itself(verb: str) -> None:
    text = HELPS[verb]
    assert text.splitlines()[0].endswith("."), text
    last = verb.split()[-1]
    example = text.partition("Example: ")[2]
    assert "mlxctl " in example
    assert last in example.split()
