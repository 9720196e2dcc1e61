"""Output that the verbs share: `--json`, and text that is safe on a terminal."""

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer
from rich.console import Console

from gateway.config.syntax import parse_duration

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Anyway = Annotated[bool, typer.Option("--yes", "-y", help="Load it even if its weights exceed the free memory.")]


def print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_result(value: object, text: str, json: bool) -> None:
    """Print a result: `value` for programs, `text` for people."""
    if json:
        print_json(value)
    else:
        typer.echo(text)


def records(lines: Iterable[bytes], decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    """Decode the records that a child process prints, one per line. Other lines come from a model's code and go to
    stderr.
    """
    for line in lines:
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            typer.echo(harmless(line.decode(errors="replace")), nl=False, err=True)


def console() -> Console:
    """Return a console that treats all text as data, never as markup. For a pipe it is wide, so that no text is cut
    off.
    """
    return Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 240)


def progress_bar(*columns: "ProgressColumn") -> "Progress":
    """Return a progress bar on stderr that counts bytes and has additional `columns`. It is shown on a
    terminal only.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    text, download = TextColumn("{task.description}", markup=False), DownloadColumn(binary_units=True)
    out = Console(stderr=True)
    return Progress(text, BarColumn(), download, *columns, console=out, transient=True, disable=not out.is_terminal)


def harmless(text: str) -> str:
    """Remove control characters: text of a client or a model must not control the terminal."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")


def seconds(text: str, option: str) -> float:
    """Parse a duration of the command line, such as 5m."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
