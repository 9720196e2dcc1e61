"""Models on this machine, configured or only downloaded, with their needs and whether they would fit."""

from msgspec import Struct

from gateway.model_files.hub_cache import cached_models
from gateway.model_files.metadata import Unreadable, find, inspect

NOT_CONFIGURED = "not configured"


class ListedModel(Struct, frozen=True):
    """One listed model. `state` is `stopped` if no daemon runs, and `not configured` if the model is only
    in the cache.
    """

    name: str
    aliases: tuple[str, ...]
    path: str
    state: str
    size_bytes: int
    memory_bytes: int
    context: int
    fits: bool | None
    verdict: str


class ConfiguredModel(Struct, frozen=True):
    """The settings of a configured model that the listing uses."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    dtype: str = "auto"
    context: int = 0
    state: str = "stopped"
    is_loaded: bool = False


def list_models(known: list[ConfiguredModel], available_bytes: int) -> list[ListedModel]:
    """List the known models, then those that are only in the cache. Blocks while reading files."""
    paths = {model.path for model in known}
    more = (ConfiguredModel(name, name, state=NOT_CONFIGURED) for name in cached_models() if name not in paths)
    return [_listed(model, available_bytes) for model in (*known, *more)]


def _listed(model: ConfiguredModel, available_bytes: int) -> ListedModel:
    head = (model.name, model.aliases, model.path, model.state)
    try:
        info = inspect(find(model.path), model.dtype, model.context, available_bytes)
    except Unreadable as error:
        return ListedModel(*head, 0, 0, model.context, None, str(error))
    fits, verdict = (True, "is loaded") if model.is_loaded else (info.fits, info.verdict)
    return ListedModel(*head, info.disk_bytes, info.weights_bytes, info.context or 0, fits, verdict)
