"""Output that the verbs share: `--json`, and text that is safe on a terminal."""

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Anyway = Annotated[bool, typer.Option("--yes", "-y", help="Load it even if its weights exceed the free memory.")]


def print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def tell(value: object, text: str, json: bool) -> None:
    """Print a result: `value` for programs, `text` for people."""
    if json:
        print_json(value)
    else:
        typer.echo(text)


def records(lines: Iterable[bytes], decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    """Records that a process of ours prints, one a line. Other lines, of a model's own code, go to standard error."""
    for line in lines:
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            typer.echo(harmless(line.decode(errors="replace")), nl=False, err=True)


def console() -> "Console":
    """For tables: a pipe has no width, so nothing is cut off there."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=240)


def harmless(text: str) -> str:
    """Without what would command the terminal: a client or a model may write anything."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def seconds(text: str, option: str) -> float:
    """A duration of the command line, such as 5m."""
    from gateway.config.syntax import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
