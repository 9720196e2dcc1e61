"""What the verbs share: `--json`, and a failure as one line and an exit status."""

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def ask(call: Callable[[], T]) -> T:
    """Run `call`; a `Failed` of it is one line on stderr and an exit status."""
    from gateway.ctl.client import Failed

    try:
        return call()
    except Failed as error:
        typer.echo(f"mlxctl: {error}", err=True)
        raise typer.Exit(error.status) from None


def print_json(value: object) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def harmless(text: str) -> str:
    """Without what would command the terminal: a client or a model may write anything."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
