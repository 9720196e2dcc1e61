"""`mlxctl models`: configured and downloaded models. `mlxctl ps`: models with a process."""

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gateway.ctl import client
from gateway.ctl.model_verbs.offline import available_bytes, read_config, running_models
from gateway.ctl.printing import Json, console, print_json
from gateway.ctl.rates import SPAN_S, RateSample, sample_rates
from gateway.ctl.tables import bar, duration, notes, size_or_dash, state_text, table
from gateway.model_files.listing import ConfiguredModel, ListedModel, list_models
from gateway.model_files.metadata import DEMOS


def models(json: Json = False) -> None:
    """Show every model that is configured or downloaded, what it needs and whether it would fit now.

    Example: mlxctl models
    """
    models = _list()
    if json:
        print_json(models)
    else:
        console().print(_models_table(models))


def ps(
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds over which the token rate is measured.")] = SPAN_S,
    json: Json = False,
) -> None:
    """Show the models that have a process: what it holds and what it does.

    Example: mlxctl ps
    """
    sample = sample_rates(client.status, interval)
    if json:
        print_json(sample.models)
    elif not sample.models:
        typer.echo("No model has a process. One is started by the first request for it, or by: mlxctl load MODEL")
    else:
        console().print(ps_table(sample))
        notes(sample.models)


def _list() -> list[ListedModel]:
    """List the models of the daemon, or else of the configuration, and those that are only in the cache. Raises
    `CommandFailed`.
    """
    running, available = running_models(), available_bytes()
    if running is not None:
        # The daemon's list is preferred, because the file may have changed since the daemon read it.
        known = [
            ConfiguredModel(model.name, model.path, model.aliases, "auto", model.context, model.state, model.pid != 0)
            for model in running
        ]
    else:
        known = [
            ConfiguredModel(model.name, model.path, model.aliases, model.dtype, model.context)
            for model in read_config().models.values()
        ]
    return list_models(known, available)


def _models_table(found: list[ListedModel]) -> Table:
    rows = (
        (
            model.name,
            state_text(model.state),
            size_or_dash(model.size_bytes),
            size_or_dash(model.memory_bytes),
            model.context or "-",
            Text({True: "yes", False: "no", None: "?"}[model.fits], style="" if model.fits else "red"),
            ", ".join(model.aliases) or "-",
            _place(model),
        )
        for model in found
    )
    return table(("MODEL", "STATE"), ("DISK", "MEMORY", "CONTEXT"), rows, ("FITS", "ALIASES", "PATH"))


def _place(model: ListedModel) -> str:
    if model.path in DEMOS:
        return "built in"
    return "-" if model.path == model.name else model.path


def ps_table(found: RateSample, budget_bytes: int = 0) -> Table:
    """Make a table with one row for each model process. If there is a memory budget, a bar shows the process's part of
    it.
    """
    bars = ("OF BUDGET",) if budget_bytes else ()
    rows = (
        (
            model.name,
            state_text(model.state, f"loading {model.loaded:.0%}" if model.state == "loading" and model.loaded else ""),
            model.pid,
            size_or_dash(model.memory_bytes),
            size_or_dash(model.kv_bytes),
            f"{model.running}/{model.slots}",
            model.waiting,
            f"{model.tokens_per_s:.1f}",
            "-" if model.cache_hit_rate is None else f"{model.cache_hit_rate:.0%}",
            duration(model.uptime_s),
            *(bar(model.memory_bytes, budget_bytes, 20) for _ in bars),
        )
        for model in found.models
    )
    numbers = ("PID", "MEMORY", "KV", "RUN", "WAIT", "TOK/S", "CACHED", "UP")
    return table(("MODEL", "STATE"), numbers, rows, bars)
