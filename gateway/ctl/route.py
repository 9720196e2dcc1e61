"""`mlxctl route`: the place that would serve a model's next request, and the reason; without a model, the peers."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gateway.control_types import PlaceView, RouteView
from gateway.ctl import client
from gateway.ctl.printing import Json, console, print_json
from gateway.ctl.tables import table

HERE = "here"


def route(
    model: Annotated[
        str | None, typer.Argument(help="Name that a client would send. Without one: the peers.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of the prompt, none of them cached.")] = 1000,
    json: Json = False,
) -> None:
    """Show where a request for a model would go now, and why; what is not a choice is shown with its reason.

    Example: mlxctl route coder --tokens 8000
    """
    from urllib.parse import urlencode

    view = client.get(f"/v1/route?{urlencode({'model': model or '', 'tokens': tokens})}", RouteView)
    if json:
        print_json(view)
    elif not view.places:
        typer.echo("There are no peers: requests are served here. See [peers] in mlxd.toml")
    else:
        if view.model:
            typer.echo(_sentence(view))
        console().print(_table(view.places))


def _sentence(view: RouteView) -> str:
    chosen = next((place for place in view.places if place.is_chosen), None)
    if chosen is None:
        return f"{view.model}: no place can serve it now"
    reasons = {
        "only": "it is the only place that has the model",
        "cost": "its first token comes first there",
        "affinity": "the conversation is warm there",
    }
    place = f"by the peer {chosen.name}" if chosen.name else HERE
    return f"{view.model} would be served {place}: {reasons.get(view.reason, view.reason)}"


def _table(places: list[PlaceView]) -> Table:
    rows = (
        (
            Text(place.name or HERE, style="bold" if place.is_chosen else ""),
            place.state or "-",
            "-" if place.ineligibility else f"{place.wait_s:.1f} s",
            f"{place.load_s:.0f} s" if place.load_s and not place.ineligibility else "-",
            f"{place.prefill_rate:.0f}/s" if place.prefill_rate else "-",
            "-" if place.ineligibility else f"{place.cost_s:.1f} s",
            place.form[:8] or "-",
            place.ineligibility or ("chosen" if place.is_chosen else ""),
        )
        for place in places
    )
    return table(("PLACE", "STATE"), ("QUEUE", "LOAD", "PREFILL", "COST"), rows, ("FORM", "NOTE"))
