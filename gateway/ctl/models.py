"""Verbs about models on this machine: `models`, `ps`, `rm`, `repack` and `adapter`.

`mlxctl models`: configured and downloaded models. `mlxctl ps`: models with a process.

`mlxctl rm`: removes a downloaded model from the Hugging Face cache.

`mlxctl repack`: rewrites a model so that its experts can stay on disk.

`mlxctl adapter`: show adapters, load them and unload them while their model serves.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from gateway.command_failed import CommandFailed
from gateway.config.settings import Config
from gateway.control_types import AdapterList, AdapterStatus
from gateway.ctl import client
from gateway.ctl.offline import (
    available_bytes,
    complete_downloaded,
    complete_models,
    model_argument,
    model_of,
    read_config,
    running_models,
)
from gateway.ctl.tables import (
    SPAN_S,
    Json,
    RateSample,
    bar,
    console,
    duration,
    notes,
    print_json,
    print_result,
    sample_rates,
    size,
    size_or_dash,
    state_text,
    table,
)
from gateway.model_files.hub_cache import cache_dir, is_cached, remove, repository_bytes, repository_of
from gateway.model_files.metadata import DEMOS, ConfiguredModel, ListedModel, list_models


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


def rm(
    model: Annotated[str, model_argument("A model's name or alias, or a repository.", complete=complete_downloaded)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove a downloaded model from the disk. A folder of your own is left alone, as is a model that is loaded.

    Example: mlxctl rm mlx-community/Qwen3-4B-4bit --yes
    """
    config = read_config()
    repository = _find(config, model)
    _refuse_loaded(repository)
    held = repository_bytes(repository)
    if not yes:
        if not sys.stdin.isatty():
            raise CommandFailed(f"{repository} holds {size(held)}; --yes removes it")
        typer.confirm(f"Remove {repository}, {size(held)}?", abort=True, err=True)
    freed = remove(repository)
    print_result(
        {"repository": repository, "freed_bytes": freed}, f"{repository} is removed: {size(freed)} are free again", json
    )
    # The configuration is read again: a model that was in it only because it was in the cache is no longer in it.
    if not json and (named := [one.name for one in read_config().models.values() if one.path == repository]):
        typer.echo(f"{config.config_path} still has it as {', '.join(named)}", err=True)


def _find(config: Config, name: str) -> str:
    """Return the repository that a name stands for, which must be in the cache. Raises `CommandFailed`."""
    path = model_of(config, name).path
    if path in DEMOS:
        raise CommandFailed("the demo models are part of mlxd and cannot be removed")
    if repository := _repository(path):
        if not is_cached(repository):
            raise CommandFailed(f"{repository} is not in the Hugging Face cache ({cache_dir()})")
        return repository
    if Path(path).expanduser().is_dir():
        raise CommandFailed(f"{path} is a folder outside of the Hugging Face cache, which mlxctl leaves alone")
    raise CommandFailed(f"there is no model {name}")


def _repository(path: str) -> str | None:
    """Return the repository of a model's path. The path is the repository's name or the folder of a snapshot."""
    folder, hub = Path(path).expanduser(), cache_dir()
    if folder.is_relative_to(hub) and folder != hub:
        return repository_of(folder.relative_to(hub).parts[0])
    is_name = not path.startswith((".", "/", "~")) and path.count("/") <= 1
    return path if is_name and not folder.is_dir() else None


def _refuse_loaded(repository: str) -> None:
    """Check that the repository is not loaded. Its files are mapped, and a restart reads them again. Raises
    `CommandFailed`.
    """
    for model in running_models() or ():
        if model.pid and _repository(model.path) == repository:
            raise CommandFailed(f"{repository} is loaded as {model.name}; first: mlxctl unload {model.name}")


def repack(
    model: Annotated[str, model_argument("A model's name or alias, a folder, or a repository.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. [default: repacked/MODEL in mlxd's home]", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Write a model with experts in a form whose experts can stay on disk. Needs as much disk as the model has.

    The model itself is left as it is. Serve the new folder with `experts = "disk"`.

    Example: mlxctl repack mlx-community/Qwen3-30B-A3B-4bit
    """
    config = read_config()
    found = model_of(config, model)
    target = (out or config.home / "repacked" / found.name.replace("/", "--")).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "worker.tools.repack", found.path, str(target)]
    if found.trust_remote_code:
        command.append("--trust-remote-code")
    # Repacking needs MLX, which mlxctl does not import, so the worker's tool does it.
    if subprocess.run(command, check=False, stdout=sys.stderr if json else None).returncode:
        raise CommandFailed(f"{model} was not repacked")
    name = found.name.rpartition("/")[2]
    text = f'Serve it with:\n\n[models."{name}-disk"]\npath = "{target}"\nexperts = "disk"'
    print_result({"path": str(target)}, text, json)


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
