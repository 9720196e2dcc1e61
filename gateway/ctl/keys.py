"""`mlxctl keys`: API keys. It edits the key file itself, with or without a daemon; a running daemon reads the change.

The secret alone is written to stdout, so that `KEY=$(mlxctl keys create NAME)` holds nothing else.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import typer

from gateway.access.key import Key, KeyFile
from gateway.command_failed import CommandFailed
from gateway.control_types import UsageReport
from gateway.ctl import tables
from gateway.ctl.client import get
from gateway.ctl.tables import Json, print_json, print_result, seconds
from gateway.state_dir import default_home, keys_path, usage_path

app = typer.Typer(help="Create, change, show and revoke API keys.", no_args_is_help=True)


Name = Annotated[str, typer.Argument(help="The key's name, as logs and metrics show it.", show_default=False)]

Role = Annotated[
    Literal["user", "admin", "metrics"] | None,
    typer.Option(
        help="admin: all models, no limits, /metrics and deep health; metrics: only /metrics.",
        show_default=False,
    ),
]
ShareCache = Annotated[
    bool | None,
    typer.Option("--share-cache/--own-cache", help="Share the prefix cache with other keys that share it."),
]


def _limit(text: str) -> object:
    return typer.Option(min=0, help=f"{text}; 0 is no limit.", show_default=False)


def _percent(text: str) -> object:
    return typer.Option(min=0, max=100, help=text, show_default=False)


# A function that carries out a verb. Its arguments are the key's name, the fields of `Key` that the options set,
# whether the key shares the prefix cache, and whether to print JSON.
_Change = Callable[[str, dict[str, Any], bool | None, bool], None]


def _add_verb(verb: str, change: _Change) -> None:
    """Register `change` as a verb that takes the options of a key."""

    def command(
        name: Name,
        more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
        models: Annotated[
            list[str] | None,
            typer.Option(help="Names, aliases or patterns of models; '*' means all.", metavar="PATTERN..."),
        ] = None,
        rpm: Annotated[int | None, _limit("Requests per minute, each counted as its sequences (prompts x n)")] = None,
        tpm: Annotated[int | None, _limit("Tokens per minute, prompt and completion")] = None,
        concurrency: Annotated[int | None, _limit("Sequences (prompts x n) at once, of all requests")] = None,
        max_sequences: Annotated[int | None, _limit("Sequences (prompts x n) of one request")] = None,
        max_tokens: Annotated[int | None, _limit("Tokens of one answer")] = None,
        requests_per_day: Annotated[int | None, _limit("Requests of a day, each counted as its sequences")] = None,
        tokens_per_day: Annotated[int | None, _limit("Tokens of a day")] = None,
        requests_per_month: Annotated[int | None, _limit("Requests of a month, each counted as its sequences")] = None,
        tokens_per_month: Annotated[int | None, _limit("Tokens of a month")] = None,
        alert_at: Annotated[
            int | None, _percent("Percent of a budget at which a warning is logged; 0 is never.")
        ] = None,
        queue_share: Annotated[int | None, _percent("Most percent of a model's queue; 0 means half.")] = None,
        expires: Annotated[str | None, typer.Option(help="Expiry after a duration (12h, 30d), or never.")] = None,
        role: Role = None,
        admin: Annotated[bool, typer.Option("--admin", help="The same as --role admin.")] = False,
        priority: Annotated[
            int | None,
            typer.Option(min=-100, max=100, help="Lower runs first when a model is busy.", show_default=False),
        ] = None,
        share_cache: ShareCache = None,
        may_leave: Annotated[
            bool | None,
            typer.Option(
                "--may-leave/--stays", help="Whether its requests may go to upstreams, outside of this machine."
            ),
        ] = None,
        json: Json = False,
    ) -> None:
        change(name, _fields(locals()), share_cache, json)

    app.command(verb, help=change.__doc__)(command)


def create(name: str, fields: dict[str, Any], shares_cache: bool | None, json: bool) -> None:
    """Create a key and print its secret, which is shown once.

    Example: mlxctl keys create alice --models 'qwen*' --rpm 60 --expires 30d
    """
    is_first = not _file().read()
    key, secret = _file().create(
        Key(name=name, prefix="", salt="", hash="", **fields), shares_cache=shares_cache is True
    )
    _show_secret(key, secret, json)
    if is_first and not json:
        typer.echo("From now on every request needs a key, as: Authorization: Bearer KEY", err=True)


def set_key(name: str, fields: dict[str, Any], shares_cache: bool | None, json: bool) -> None:
    """Change a key in place: only the given options change; the secret stays.

    Example: mlxctl keys set alice --rpm 120 --tokens-per-day 2000000
    """
    if not fields and shares_cache is None:
        raise typer.BadParameter("name what to change, such as --rpm 60")
    print_result(_public(_file().change(name, shares_cache=shares_cache, **fields)), f"{name} is changed", json)


_add_verb("create", create)
_add_verb("set", set_key)


@app.command()
def disable(name: Name, json: Json = False) -> None:
    """Disable a key: it is refused from the next request on, until it is enabled. Running requests finish.

    Example: mlxctl keys disable alice
    """
    print_result(_public(_file().change(name, is_disabled=True)), f"{name} is disabled", json)


@app.command()
def enable(name: Name, json: Json = False) -> None:
    """Enable a disabled key.

    Example: mlxctl keys enable alice
    """
    print_result(_public(_file().change(name, is_disabled=False)), f"{name} is enabled", json)


@app.command("list")
def list_keys(json: Json = False) -> None:
    """Show every key, without its secret.

    Example: mlxctl keys list
    """
    keys = _file().read()
    used = _last_used() if keys else {}
    if json:
        print_json([_public(key) | {"last_used": used.get(key.name)} for key in keys])
    elif not keys:
        typer.echo("No keys. Make one with: mlxctl keys create NAME", err=True)
    else:
        tables.keys(keys, used, time.time())


@app.command()
def revoke(name: Name, json: Json = False) -> None:
    """Revoke a key: it is refused from the next request on. Running requests finish.

    Example: mlxctl keys revoke alice
    """
    file = _file()
    left = file.revoke(name)
    print_result({"name": name, "left": left}, f"{name} is revoked", json)
    if not left and not json:
        typer.echo(
            f"No key is left, and every request is refused until there is one. To open the loopback to every client "
            f"again, remove {file.path}",
            err=True,
        )


@app.command()
def rotate(name: Name, json: Json = False) -> None:
    """Replace a key's secret. The new one is shown once, the old one is refused from now on; the rest stays.

    Example: mlxctl keys rotate alice
    """
    _show_secret(*_file().rotate(name), json)


@app.command()
def usage(json: Json = False) -> None:
    """Show the usage of each key, kept over restarts; `mlxctl usage` shows it by day and model.

    Example: mlxctl keys usage
    """
    report = get("/v1/keys/usage", UsageReport)
    if json:
        print_json(report)
    else:
        tables.usage(report)


def _file() -> KeyFile:
    return KeyFile(keys_path(default_home()))


def _last_used() -> dict[str, float]:
    """Return the time of each key's last use, from the running daemon or else from the usage file."""
    from gateway.access.usage import last_used

    used = last_used(usage_path(default_home()))
    try:
        report = get("/v1/keys/usage", UsageReport)
    except CommandFailed:  # listing keys needs no daemon
        return used
    return used | {key.name: key.last_used for key in report.keys if key.last_used}


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a key that the options of a verb set."""
    models, more, expires, role = (options[name] for name in ("models", "more", "expires", "role"))
    if options["admin"] and role not in (None, "admin"):
        raise typer.BadParameter(f"a key is an admin's or has the role {role}, not both", param_hint="--admin")
    if more and not models:
        raise typer.BadParameter(f"what is {more[0]!r}? One name; patterns of models belong after --models")
    fields = {
        name: value
        for name, value in options.items()
        if name in Key.__struct_fields__ and name not in ("name", "models", "expires") and value is not None
    }
    if models:
        patterns = tuple(part.strip() for text in (*models, *(more or ())) for part in text.split(","))
        fields["models"] = () if patterns == ("*",) else patterns
    if expires is not None:
        fields["expires"] = None if expires == "never" else _expiry(expires)
    if role is not None or options["admin"]:
        fields |= {"is_admin": role in (None, "admin"), "is_metrics_only": role == "metrics"}
    return fields


def _expiry(text: str) -> float:
    length_s = seconds(text, "--expires")
    if length_s <= 0:
        raise typer.BadParameter("a key must last a while", param_hint="--expires")
    return time.time() + length_s


def _show_secret(key: Key, secret: str, json: bool) -> None:
    if json:
        print_json(_public(key) | {"key": secret})
        return
    typer.echo(f"Key {key.name}; this is shown once:", err=True)
    typer.echo(secret)


def _public(key: Key) -> dict[str, object]:
    """Return the fields of a key that may be printed."""
    fields: dict[str, object] = msgspec.to_builtins(key)
    return {name: value for name, value in fields.items() if name not in ("salt", "hash", "cache_salt")} | {
        "shares_cache": not key.cache_salt
    }
