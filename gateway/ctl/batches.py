"""`mlxctl batches`: the batches of all keys, and how to cancel one."""

from typing import Annotated

import typer

from gateway.control_types import BatchViews, CancelResult
from gateway.ctl.client import get, post
from gateway.ctl.tables import Json, console, duration, print_json, print_result, table

BatchId = Annotated[str, typer.Argument(help="A batch's id, as mlxctl batches shows it.", show_default=False)]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def batches(context: typer.Context, json: Json = False) -> None:
    """Show the batches: state, model, and how many requests are done.

    Example: mlxctl batches
    """
    if context.invoked_subcommand is not None:
        return
    listed = get("/v1/batches", BatchViews)
    if json:
        print_json(listed)
    elif not listed.batches:
        typer.echo("there are no batches")
    else:
        rows = (
            (
                batch.id,
                batch.model or "-",
                batch.key or "-",
                batch.endpoint,
                batch.state,
                batch.total,
                batch.succeeded,
                batch.failed,
                duration(batch.age_s),
            )
            for batch in listed.batches
        )
        labels, numbers = ("ID", "MODEL", "KEY", "ENDPOINT", "STATE"), ("REQUESTS", "DONE", "FAILED", "AGE")
        console().print(table(labels, numbers, rows))


@app.command()
def cancel(batch: BatchId, json: Json = False) -> None:
    """Cancel a batch. What is done stays readable. Exit status 1 when no batch of this id runs or waits.

    Example: mlxctl batches cancel batch_0123456789abcdef01234567
    """
    done = post("/v1/batches/cancel", {"id": batch}, CancelResult)
    print_result(done, f"{done.id} is being cancelled", json)
