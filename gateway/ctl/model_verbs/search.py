"""`mlxctl search` and `mlxctl recommend`: models of the hub that MLX loads and that fit this machine."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from gateway.ctl.model_verbs.offline import available_bytes
from gateway.ctl.printing import Json, console, print_json
from gateway.ctl.tables import size_or_dash, table

if TYPE_CHECKING:
    from gateway.model_files.search import FoundRepository

Limit = Annotated[int, typer.Option("--limit", "-n", min=1, max=50, help="Most models to list.")]


def search(
    words: Annotated[list[str], typer.Argument(help="Words that the repository's name has.", metavar="WORDS...")],
    limit: Limit = 10,
    every: Annotated[
        bool, typer.Option("--all", help="List also models that do not fit or cannot be loaded, with the reason.")
    ] = False,
    json: Json = False,
) -> None:
    """Search the hub for MLX models that can be loaded and fit this machine, the most downloaded first.

    Without a network, mlxd's own short list is searched. Exit status 1 if no model is listed.

    Example: mlxctl search qwen3 coder
    """
    from gateway.model_files.hub import HubFailed
    from gateway.model_files.search import search as search_hub
    from gateway.model_files.search import search_shortlist

    available, offline = available_bytes(), ""
    try:
        found = search_hub(words, available, limit)
    except HubFailed as error:
        found, offline = search_shortlist(words, available), str(error)
    listed = found if every else [model for model in found if model.is_usable][:limit]
    _show(listed, offline, json)
    hidden = len(found) - len(listed)
    if listed and hidden and not json:
        typer.echo(f"{hidden} more cannot be used here; --all lists them with the reason", err=True)
    if not listed:
        matches = f", but {hidden} that cannot; --all lists them with the reason" if hidden else ""
        typer.echo(f"mlxctl: no model for {' '.join(words)} can be used here{matches}", err=True)
        raise typer.Exit(1)


def recommend(limit: Limit = 10, json: Json = False) -> None:
    """List models that fit this machine with memory left for long prompts.

    The models of mlxd's own short list come first, then the hub's most downloaded. Without a network, only the short
    list is used. Exit status 1 if no model is listed.

    Example: mlxctl recommend
    """
    from gateway.model_files.search import recommend as recommend_from_hub

    found = recommend_from_hub(available_bytes(), limit)
    _show(found.candidates, found.offline, json)
    if not found.candidates:
        typer.echo("mlxctl: no model of the list fits this machine now (mlxctl status shows what is loaded)", err=True)
        raise typer.Exit(1)


def _show(models: "list[FoundRepository]", offline: str, json: bool) -> None:
    if offline:
        typer.echo(f"mlxctl: {offline}; this is mlxd's own short list", err=True)
    if json:
        print_json(models)
    elif models:
        _table(models)
        typer.echo(f"Talk to one: mlxctl run {models[0].repository}", err=True)


def _table(models: "list[FoundRepository]") -> None:
    last = ("FITS", "FOR") if any(model.purpose for model in models) else ("FITS",)
    rows = (
        (
            model.repository,
            size_or_dash(model.info.disk_bytes if model.info else 0),
            size_or_dash(model.info.weights_bytes if model.info else 0),
            (model.info and model.info.context) or "-",
            "-" if model.downloads is None else f"{model.downloads:,}",
            ("here already" if model.is_downloaded else "yes") if model.is_usable else Text(model.reason, style="red"),
            *(model.purpose or "-" for _ in last[1:]),
        )
        for model in models
    )
    console().print(table(("MODEL",), ("DISK", "MEMORY", "CONTEXT", "DOWNLOADS"), rows, last))
