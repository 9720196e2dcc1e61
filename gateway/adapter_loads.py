"""Adapters that an operator loads into a running daemon, in addition to those of the configuration."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from gateway.config.load import invalid_adapter_name_reason, taken_name
from gateway.config.settings import Config
from gateway.model_files.metadata import DEMO_ADAPTER
from protocol.spec import ADAPTERS_MAX

log = logging.getLogger(__name__)


class NotAllowed(Exception):
    """An adapter may not be loaded; the message gives the reason."""


class AdapterLoads:
    """Paths of loaded adapters by model and name. The reloader owns and applies them."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, str], str] = {}

    def __contains__(self, adapter: tuple[str, str]) -> bool:
        return adapter in self._paths

    def add(self, model: str, name: str, path: str) -> None:
        self._paths[model, name] = path

    def remove(self, model: str, name: str) -> None:
        self._paths.pop((model, name), None)

    def find(self, name: str) -> tuple[str, str] | None:
        """Return the model and the name of the adapter that `name` (NAME or MODEL:NAME) refers to."""
        return next((each for each in self._paths if name in (each[1], ":".join(each))), None)

    def added_to(self, config: Config) -> Config:
        """Return a copy of `config` with these adapters. Leaves out an adapter if its model is gone or its name is
        taken.
        """
        for (model, name), path in self._paths.items():
            with suppress(NotAllowed):
                config = with_adapter(config, model, name, path)
        return config

    def forget_missing(self, config: Config) -> None:
        """Forget the adapters that are not in the applied configuration."""
        for (model, name), path in list(self._paths.items()):
            known = config.models.get(model)
            if known is None or known.adapters.get(name) != path:
                log.warning("the adapter %s of %s is unloaded: the configuration leaves no room for it", name, model)
                del self._paths[model, name]


def with_adapter(config: Config, model: str, name: str, path: str) -> Config:
    """Return a copy of `config` with one more adapter. Raises `NotAllowed`."""
    if model not in config.models:
        raise NotAllowed(f"there is no model {model!r}")
    if reason := invalid_adapter_name_reason(name):
        raise NotAllowed(f"its name {reason}")
    adapters = config.models[model].adapters
    if config.models[model].group.ranks:
        raise NotAllowed(f"several processes run {model!r}, which take no adapters")
    if name in adapters:
        raise NotAllowed(f"{model!r} has an adapter {name!r} already: unload that first")
    if len(adapters) >= ADAPTERS_MAX:
        raise NotAllowed(f"{model!r} has {ADAPTERS_MAX} adapters, the most that it may have")
    changed = structs.replace(config.models[model], adapters={**adapters, name: path})
    models = {**config.models, model: changed}
    if (taken := taken_name(models)) is not None:
        raise NotAllowed(f"{taken[2]} has that name already")
    return structs.replace(config, models=models)


def allowed_path(path: str, home: Path, folders: Sequence[str]) -> str:
    """Resolve the path of an adapter's folder, absolute or relative to `home`. Raises `NotAllowed`.

    The folder, with all links followed, must be below `home` or one of `folders`. The built-in adapter is named without
    a folder and returned unchanged.
    """
    if path == DEMO_ADAPTER:
        return path
    try:
        real = (home / path).resolve(strict=True)
        roots = [Path(folder).resolve() for folder in (home, *folders)]
    except (OSError, ValueError, RuntimeError):
        raise NotAllowed(f"there is no folder {path!r}, or it may not be looked at") from None
    if not real.is_dir():
        raise NotAllowed(f"{path!r} is no folder")
    if not any(real.is_relative_to(root) for root in roots):
        raise NotAllowed(f"{path!r} lies neither below {home} nor below a folder of [server] adapter_folders")
    return str(real)
