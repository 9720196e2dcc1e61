"""`mlxctl info`: the memory and disk needs of a model on this machine or on the hub."""

from collections.abc import Callable
from typing import Annotated, Final

import typer
from msgspec import structs

from gateway.config.settings import ModelConfig
from gateway.ctl.complete import a_model
from gateway.ctl.model_verbs.offline import available_bytes, folder_of, model_of, read_config
from gateway.ctl.printing import Json, print_json
from gateway.ctl.tables import OUTPUT_UNITS, measured, size
from gateway.failed import CommandFailed
from gateway.media.modalities import SETUP, has_towers_library
from gateway.model_files.hub_cache import split_revision
from gateway.model_files.known_times import KnownTimes, speeds
from gateway.model_files.metadata import ModelMetadata, Unreadable, adapter_sizes, inspect
from protocol.timing_profile import profiles_dir

HEAD: Final = "for multi-token prediction: drafts where that pays"


def info(
    model: Annotated[
        str, a_model("A model's name or alias, a folder, or a repository (ORG/NAME or ORG/NAME@REVISION).")
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
    info = structs.replace(_look(configured), measured=speeds(times), adapters=adapter_sizes(configured.adapters))
    if configured.group.ranks and (problem := model_problem(configured)):
        info = structs.replace(info, obstacles=(*info.obstacles, f"as a group: {problem}"))
    if json:
        print_json(info)
    else:
        print_info(model, info)
    if not info.fits or info.obstacles:
        raise typer.Exit(1)


def print_info(name: str, found: ModelMetadata, tell: Callable[[str], None] = typer.echo) -> None:
    """Print a model's needs for people, line by line."""
    kv = "not computed for this attention"
    if found.kv_1k_bytes is not None:
        kv = f"{size(found.kv_1k_bytes)} per 1,000 tokens" + (f", in {found.kv_bits} bits" if found.kv_bits else "")
    place = found.path if found.is_downloaded else f"not downloaded (mlxctl pull {found.path})"
    context = f"{found.context or '?'} tokens"
    if found.tokens_max is not None and found.context and found.tokens_max < found.context:
        context += f", of which memory holds {found.tokens_max}"
    tell(f"{name}: {found.model_type or '?'}, {place}")
    if found.kind in OUTPUT_UNITS:
        tell(f"makes      {OUTPUT_UNITS[found.kind]}")
    tell(f"weights    {size(found.weights_bytes)} in memory, {size(found.disk_bytes)} on disk")
    if found.expert_bytes:
        held, total = size(found.expert_cache_bytes), size(found.expert_bytes)
        tell(f"experts    {held} of {total} in memory, the others are read from disk when they are chosen")
    tell(f"KV         {kv}")
    tell(f"context    {context}")
    if found.modalities:
        tell(f"media      {', '.join(found.modalities)}; {size(found.tower_bytes)} of the weights encode them")
        if not has_towers_library():
            tell(typer.style(f"           not served without mlx-vlm: {SETUP}", fg="yellow"))
    if found.adapters:
        told = (f"{name} {size(count) if count else '(not here)'}" for name, count in found.adapters.items())
        tell(f"adapters   {', '.join(told)} beside the weights")
    if found.measured is not None:
        tell(measured("measured  ", found.measured))
    if found.head:
        tell(f"head       {HEAD if found.head == 'run' else found.head}")
    tell(f"available  {size(found.available_bytes)}")
    tell(found.verdict)
    for obstacle in found.obstacles:
        tell(typer.style(f"cannot be loaded: {obstacle}", fg="red"))


def _look(model: ModelConfig) -> ModelMetadata:
    """Inspect the model's files here, or else on the hub. Raises `CommandFailed`."""
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
        repository = hub.look(*split_revision(model.path))
        info = hub.inspect(repository, model.dtype, model.context, available_bytes(), model.kv_bits or 0)
        if info is None:
            raise CommandFailed(f"{repository.id} cannot be loaded: {'; '.join(hub.obstacles(repository))}")
    except hub.HubFailed as error:
        raise CommandFailed(f"{here}\n{error}") from None
    return info


def is_repository(path: str) -> bool:
    """Whether a path could be the name of a repository on the hub."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))
