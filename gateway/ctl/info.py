"""`mlxctl info`: the memory and disk needs of a model on this machine or on the hub."""

from collections.abc import Callable
from typing import Annotated, Final

import typer
from msgspec import structs

from gateway.config.experimental import experiments_of
from gateway.config.settings import ModelConfig
from gateway.ctl.complete import model_argument
from gateway.ctl.model_verbs.offline import available_bytes, folder_of, model_of, read_config
from gateway.ctl.printing import Json, print_json
from gateway.ctl.tables import OUTPUT_UNITS, measured, output_unit, size
from gateway.failed import CommandFailed
from gateway.media.modalities import SETUP, has_towers_library
from gateway.model_files.hub_cache import split_revision
from gateway.model_files.known_times import KnownTimes, speeds
from gateway.model_files.metadata import ModelMetadata, Unreadable, adapter_sizes, inspect
from protocol.kinds import TEXT
from protocol.timing_profile import profiles_dir

HEAD: Final = "for multi-token prediction: drafts where that pays"


def info(
    model: Annotated[
        str, model_argument("A model's name or alias, a folder, or a repository (ORG/NAME or ORG/NAME@REVISION).")
    ],
    json: Json = False,
) -> None:
    """Say what a model needs and whether it fits this machine now, also before it is downloaded. Exit status 1 if not.

    Example: mlxctl info mlx-community/Qwen3-4B-4bit
    """
    from gateway.config.group_check import model_problem

    config = read_config()
    configured = model_of(config, model)
    times = KnownTimes(profiles_dir(config.home)).of(configured.name, configured.path)
    info = structs.replace(
        _look(configured),
        measured=speeds(times),
        adapters=adapter_sizes(configured.adapters),
        experimental=tuple(map(str, experiments_of(config.server, configured))),
    )
    if configured.group.ranks and (problem := model_problem(configured)):
        info = structs.replace(info, obstacles=(*info.obstacles, f"as a group: {problem}"))
    if json:
        print_json(info)
    else:
        print_info(model, info)
    if not info.fits or info.obstacles:
        raise typer.Exit(1)


def print_info(name: str, info: ModelMetadata, echo: Callable[[str], None] = typer.echo) -> None:
    """Print what is known about a model, line by line: its memory, its context, and whether it fits."""
    place = info.path if info.is_downloaded else f"not downloaded (mlxctl pull {info.path})"
    echo(f"{name}: {info.model_type or '?'}, {place}")
    if info.kind in OUTPUT_UNITS:
        echo(f"makes      {output_unit(info.kind, info.family)}")
    echo(f"weights    {size(info.weights_bytes)} in memory, {size(info.disk_bytes)} on disk")
    if info.expert_bytes:
        held, total = size(info.expert_cache_bytes), size(info.expert_bytes)
        echo(f"experts    {held} of {total} in memory, the others are read from disk when they are chosen")
    _print_lengths(info, echo)
    if info.modalities:
        echo(f"media      {', '.join(info.modalities)}; {size(info.tower_bytes)} of the weights encode them")
        if not has_towers_library():
            echo(typer.style(f"           not served without mlx-vlm: {SETUP}", fg="yellow"))
    if info.adapters:
        sizes = (f"{name} {size(count) if count else '(not here)'}" for name, count in info.adapters.items())
        echo(f"adapters   {', '.join(sizes)} beside the weights")
    if info.measured is not None:
        echo(f"speed      {measured(info.measured)}")
    if info.head:
        echo(f"head       {HEAD if info.head == 'run' else info.head}")
    echo(f"available  {size(info.available_bytes)}")
    echo(info.verdict)
    for experiment in info.experimental:
        echo(typer.style(f"experimental: {experiment}", fg="yellow"))
    for obstacle in info.obstacles:
        echo(typer.style(f"cannot be loaded: {obstacle}", fg="red"))


def _print_lengths(info: ModelMetadata, echo: Callable[[str], None]) -> None:
    """Print the KV of a model that has some, and its context, or the longest input of an encoder."""
    if info.kind == TEXT:
        kv = "not computed for this attention"
        if info.kv_1k_bytes is not None:
            kv = f"{size(info.kv_1k_bytes)} per 1,000 tokens" + (f", in {info.kv_bits} bits" if info.kv_bits else "")
        if info.kv_window_bytes:
            kv += f", and up to {size(info.kv_window_bytes)} for sliding windows"
        echo(f"KV         {kv}")
        if info.kv_warning:
            echo(typer.style(f"           {info.kv_warning}", fg="yellow"))
    elif not info.context:
        return
    context = f"{info.context or '?'} tokens"
    if info.tokens_max is not None and info.context and info.tokens_max < info.context:
        context += f", of which memory holds {info.tokens_max}"
    echo(f"context    {context}")


def _look(model: ModelConfig) -> ModelMetadata:
    """Inspect the model's files on this machine, or else on the hub. Raises `CommandFailed`."""
    try:
        cache = -1 if model.expert_cache_bytes == "auto" else model.expert_cache_bytes
        folder = folder_of(model.path)
        return inspect(folder, model.dtype, model.context, available_bytes(), model.kv_bits or 0, cache)
    except Unreadable as error:
        if not is_repository(model.path):
            raise CommandFailed(str(error)) from None
        return _on_hub(model, error)


def _on_hub(model: ModelConfig, here: Exception) -> ModelMetadata:
    from gateway.model_files import hub

    try:
        repository = hub.fetch_repository(*split_revision(model.path))
        info = hub.inspect(repository, model.dtype, model.context, available_bytes(), model.kv_bits or 0)
        if info is None:
            raise CommandFailed(f"{repository.id} cannot be loaded: {'; '.join(hub.obstacles(repository))}")
    except hub.HubFailed as error:
        raise CommandFailed(f"{here}\n{error}") from None
    return info


def is_repository(path: str) -> bool:
    """Whether a path could be the name of a repository on the hub."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))
