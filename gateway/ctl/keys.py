"""`mlxctl keys`: who may use mlxd. Works on the file itself, whether the daemon runs or not; a running one sees it.

Only what must be caught is on stdout, so `KEY=$(mlxctl keys create NAME)` holds the secret and nothing else.
"""

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from gateway.config import default_home, keys_path
from gateway.ctl.client import get
from gateway.ctl.say import Json, console, print_json, seconds
from gateway.schemas.admin import UsageReport

if TYPE_CHECKING:
    from gateway.keys import Key, KeyFile

app = typer.Typer(help="Make, show and end API keys.", no_args_is_help=True)


class Role(StrEnum):
    """Roles of keys."""

    USER = "user"
    ADMIN = "admin"
    METRICS = "metrics"


Name = Annotated[str, typer.Argument(help="The key's name, as logs and metrics show it.", show_default=False)]


@app.command()
def create(
    name: Name,
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(help="Names, aliases or patterns of models. Default: all of them.", metavar="PATTERN..."),
    ] = None,
    rpm: Annotated[int, typer.Option(min=0, help="Requests per minute; 0 is no limit.")] = 0,
    tpm: Annotated[int, typer.Option(min=0, help="Tokens per minute, prompt and completion; 0 is no limit.")] = 0,
    concurrency: Annotated[int, typer.Option(min=0, help="Requests at once; 0 is no limit.")] = 0,
    expires: Annotated[str | None, typer.Option(help="Ends after this long: 12h, 30d.")] = None,
    role: Annotated[
        Role, typer.Option(help="admin: all models, no limits, /metrics and deep health; metrics: only /metrics.")
    ] = Role.USER,
    admin: Annotated[bool, typer.Option("--admin", help="The same as --role admin.")] = False,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="Lower runs first when a model is busy.")] = 0,
    share_cache: Annotated[
        bool, typer.Option("--share-cache", help="Reuse prompts that other such keys have sent.")
    ] = False,
    json: Json = False,
) -> None:
    """Make a key and print its secret, which is shown once.

    Example: mlxctl keys create alice --models 'qwen*' --rpm 60 --expires 30d
    """
    from gateway.keys import Key

    if more and not models:
        raise typer.BadParameter(f"what is {more[0]!r}? One name; patterns of models belong after --models")
    if admin and role is Role.METRICS:
        raise typer.BadParameter("a key is an admin's or for metrics, not both", param_hint="--admin")
    patterns = [part.strip() for text in (*(models or ()), *(more or ())) for part in text.split(",")]
    key = Key(
        name=name,
        prefix="",
        salt="",
        hash="",
        models=tuple(patterns),
        rpm=rpm,
        tpm=tpm,
        concurrency=concurrency,
        expires=None if expires is None else _expiry(expires),
        is_admin=admin or role is Role.ADMIN,
        is_metrics_only=role is Role.METRICS,
        priority=priority,
    )
    made, secret = _file().create(key, shares_cache=share_cache)
    _show_secret(made, secret, json)


@app.command("list")
def list_keys(json: Json = False) -> None:
    """Show every key, without its secret.

    Example: mlxctl keys list
    """
    from gateway.ctl import show

    keys = _file().read()
    if json:
        print_json([_public(key) for key in keys])
    elif not keys:
        typer.echo("No keys. Make one with: mlxctl keys create NAME", err=True)
    else:
        show.keys(keys, time.time(), console())


@app.command()
def revoke(name: Name, json: Json = False) -> None:
    """End a key: from the next request on it is refused. What it has running goes on.

    Example: mlxctl keys revoke alice
    """
    file = _file()
    left = file.revoke(name)
    if json:
        print_json({"name": name, "left": left})
        return
    typer.echo(f"{name} is revoked")
    if not left:
        typer.echo(
            f"No key is left, and every request is refused until there is one. To open the loopback to everybody "
            f"again, remove {file.path}",
            err=True,
        )


@app.command()
def rotate(name: Name, json: Json = False) -> None:
    """Give a key a new secret, which is shown once; the old one ends now. All else stays.

    Example: mlxctl keys rotate alice
    """
    made, secret = _file().rotate(name)
    _show_secret(made, secret, json)


@app.command()
def usage(json: Json = False) -> None:
    """Show what each key has used since the daemon started; Prometheus keeps the history.

    Example: mlxctl keys usage
    """
    from gateway.ctl import show

    report = get("/v1/keys/usage", UsageReport)
    if json:
        print_json(report)
    else:
        show.usage(report, console())


def _file() -> "KeyFile":
    from gateway.keys import KeyFile

    return KeyFile(keys_path(default_home()))


def _expiry(text: str) -> float:
    length_s = seconds(text, "--expires")
    if length_s <= 0:
        raise typer.BadParameter("a key must last a while", param_hint="--expires")
    return time.time() + length_s


def _show_secret(key: "Key", secret: str, json: bool) -> None:
    if json:
        print_json(_public(key) | {"key": secret})
        return
    typer.echo(f"Key {key.name}; this is shown once:", err=True)
    typer.echo(secret)


def _public(key: "Key") -> dict[str, object]:
    """What may be shown of a key."""
    fields: dict[str, object] = msgspec.to_builtins(key)
    return {name: value for name, value in fields.items() if name not in ("salt", "hash", "cache_salt")} | {
        "shares_cache": not key.cache_salt
    }
