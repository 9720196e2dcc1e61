"""`mlxctl adapter`: show adapters, load them and unload them while their model serves."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gateway.control_types import AdapterList, AdapterStatus
from gateway.ctl import client
from gateway.ctl.complete import complete_models
from gateway.ctl.printing import Json, console, print_json, print_result
from gateway.ctl.tables import size_or_dash, table

app = typer.Typer(invoke_without_command=True)


@app.callback()
def adapter(context: typer.Context, json: Json = False) -> None:
    """Show the adapters of all models: rank, memory, requests, and why one cannot be served.

    Example: mlxctl adapter
    """
    if context.invoked_subcommand is not None:
        return
    listed = client.get("/v1/adapters", AdapterList)
    if json:
        print_json(listed)
    elif not listed.adapters:
        typer.echo("There are no adapters. See [models.NAME.adapters] in mlxd.toml, or: mlxctl adapter load --help")
    else:
        console().print(_table(listed.adapters))
        for each in listed.adapters:
            if each.failure:
                typer.secho(each.failure, fg="red", err=True)


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name that requests will ask for.", show_default=False)],
    path: Annotated[
        str, typer.Argument(help="Its folder: below `adapters` in the home, or an allowed one.", show_default=False)
    ],
    model: Annotated[
        str, typer.Option(help="The model that it is for, where there are several.", autocompletion=complete_models)
    ] = "",
    json: Json = False,
) -> None:
    """Load an adapter until the daemon ends, and its model first if need be. For longer: [models.NAME.adapters].

    Example: mlxctl adapter load sql sql-v2 --model coder
    """
    # A relative path is resolved here, because the daemon has another working folder; a bare name is below the home's
    # adapters.
    folder = str(Path(path).expanduser().absolute()) if path.startswith((".", "~")) else path
    body = {"lora_name": name, "lora_path": folder, "model": model}
    loaded = client.post("/v1/load_lora_adapter", body, AdapterStatus)
    print_result(loaded, f"{loaded.model}:{loaded.name} is loaded: {loaded.kind}, rank {loaded.rank}", json)


@app.command()
def unload(
    name: Annotated[str, typer.Argument(help="Name of an adapter that was loaded by `load`.", show_default=False)],
    json: Json = False,
) -> None:
    """Unload an adapter. Requests that run with it finish.

    Example: mlxctl adapter unload sql
    """
    unloaded = client.post("/v1/unload_lora_adapter", {"lora_name": name}, AdapterStatus)
    print_result(unloaded, f"{unloaded.model}:{unloaded.name} is unloaded", json)


def _table(adapters: list[AdapterStatus]) -> Table:
    rows = (
        (
            f"{each.model}:{each.name}",
            Text(each.state, style="red" if each.failure else ""),
            each.kind or "-",
            each.rank or "-",
            size_or_dash(each.size_bytes),
            each.requests,
            each.path,
        )
        for each in adapters
    )
    return table(("ADAPTER", "STATE", "KIND"), ("RANK", "MEMORY", "REQUESTS"), rows, ("PATH",))
