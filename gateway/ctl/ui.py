"""`mlxctl ui`: opens the web page, logged in by a code from the daemon's unix socket, and ends its sessions."""

import os
import sys
from typing import Annotated

import typer

from gateway.control_types import UiCode, UiRevoked
from gateway.ctl.client import post
from gateway.ctl.tables import Json, print_json, print_result


def ui(
    show: Annotated[bool, typer.Option("--print", help="Print the link, and open no browser.")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="End every session of the page.")] = False,
    json: Json = False,
) -> None:
    """Open the page in the browser, logged in by a link. The link works once, and expires after a minute.

    Example: mlxctl ui
    """
    if revoke:
        revoked = post("/v1/ui/revoke", {}, UiRevoked)
        print_result(
            revoked, f"{revoked.sessions} session{'' if revoked.sessions == 1 else 's'} of the page ended", json
        )
        return
    link = post("/v1/ui/code", {}, UiCode)
    if json:
        print_json(link)
    elif show or not _is_opened(link.url):
        typer.echo(link.url)


def _is_opened(url: str) -> bool:
    """Open a browser if a person can see it, and return whether it opened. In a pipe or over SSH nobody can."""
    import webbrowser

    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
