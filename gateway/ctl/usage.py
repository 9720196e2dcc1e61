"""`mlxctl usage`: usage by key, model and day."""

import csv
import sys
from datetime import datetime
from typing import Annotated, Literal
from urllib.parse import urlencode

import msgspec
import typer

from gateway.control_types import UsageLine, UsageLines
from gateway.ctl import tables
from gateway.ctl.client import get
from gateway.ctl.tables import Json, print_json


def usage(
    first: Annotated[
        datetime | None,
        typer.Option("--from", formats=["%Y-%m-%d"], metavar="DAY", help="First day; 30 days by default."),
    ] = None,
    last: Annotated[
        datetime | None,
        typer.Option("--to", formats=["%Y-%m-%d"], metavar="DAY", help="Last day, included; today by default."),
    ] = None,
    by: Annotated[str, typer.Option(help="Group by any of: day, key, model.", metavar="LIST")] = "key",
    output: Annotated[
        Literal["table", "csv", "json"], typer.Option("--format", help="Output format: table, csv or json.")
    ] = "table",
    json: Json = False,
) -> None:
    """Show what was used from one day to another, by key, model or day.

    Example: mlxctl usage --from 2026-01-01 --to 2026-01-31 --by key,model --format csv
    """
    parameters = {"from": first and f"{first:%Y-%m-%d}", "to": last and f"{last:%Y-%m-%d}", "by": by}
    query = urlencode({name: value for name, value in parameters.items() if value is not None})
    report = get(f"/v1/usage?{query}", UsageLines)
    match "json" if json else output:
        case "json":
            print_json(report)
        case "csv":
            _write_csv(report)
        case "table":
            tables.usage_lines(report)


def _write_csv(report: UsageLines) -> None:
    sums = [name for name in UsageLine.__struct_fields__ if name not in ("day", "key", "model")]
    writer = csv.DictWriter(sys.stdout, [*report.by, *sums], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(msgspec.structs.asdict, report.lines))
