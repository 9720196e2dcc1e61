"""Reload of the configuration file. The whole file is read and checked first; an invalid file changes nothing.

Limit of the prefix cache on disk, applied when the daemon starts or the limit changes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from msgspec import Struct, structs

from gateway.adapter_loads import AdapterLoads, with_adapter
from gateway.config.settings import Config, ConfigError, ModelConfig, file_key
from gateway.control_types import ReloadResult
from gateway.errors import Unavailable
from gateway.model_files import prefix_files
from gateway.services import Services
from gateway.telemetry.logs import set_level
from gateway.workers.pool import AppliedConfig

log = logging.getLogger(__name__)


async def limit_prefixes(config: Config) -> None:
    """Delete prefixes beyond the limit of `config`; all of them if no model has a prefix cache on disk.

    A configuration without models has no limit.
    """
    if not config.models:
        return
    root, limit_bytes = config.prefix_cache_dir, config.prefix_cache_bytes
    try:
        deleted = await asyncio.to_thread(prefix_files.limit, root, limit_bytes)
    except OSError as error:
        log.warning("prefix cache: the limit of %d bytes could not be applied: %s", limit_bytes, error)
        return
    if deleted.files:
        size_bytes = deleted.size_bytes
        log.info("prefix cache: deleted %d files (%d bytes) beyond its limit", deleted.files, size_bytes)


# These keys need a restart, because sockets, files and threads depend on them.
FIXED: Final = (
    "host",
    "port",
    "ollama_port",
    "tls",
    "otlp_endpoint",
)


class ReloadTarget(Protocol):
    """The part of the app that a reload uses: it applies a new configuration."""

    @property
    def services(self) -> Services: ...
    def apply(self, config: Config) -> AppliedConfig: ...


class Reloader:
    """Applies changes of the configuration, one reload at a time. `read` reads the file and may raise `ConfigError`."""

    def __init__(self, app: ReloadTarget, read: Callable[[], Config]) -> None:
        self._app = app
        self._read = read
        self._lock = asyncio.Lock()
        self.adapter_loads = AdapterLoads()

    async def reload(self) -> ReloadResult:
        """Read and apply the file, and return the changes. Restarted and removed models may not have ended yet.

        Raises `ConfigError`, which is also logged, and `Unavailable` if the daemon is ending.
        """
        async with self._lock:
            try:
                config = await asyncio.to_thread(self._read)
            except ConfigError as error:
                log.error("configuration not reloaded, the previous one stays in force: %s", error)
                raise
            if self._app.services.admission.is_draining:
                # A worker that is started now would outlive the daemon.
                raise Unavailable("The server is shutting down.", code="draining")
            done = self._apply(config)
            await limit_prefixes(self._app.services.config)
            if (tls := self._app.services.tls) is not None:
                await tls.refresh()
            return done

    async def load_adapter(self, model: str, name: str, path: str) -> None:
        """Add an adapter that stays until the daemon ends. Raises `NotAllowed`, and `Unavailable` if the daemon is
        ending.
        """
        async with self._lock:
            services = self._app.services
            if services.admission.is_draining:
                raise Unavailable("The server is shutting down.", code="draining")
            config = with_adapter(services.config, model, name, path)
            self.adapter_loads.add(model, name, path)
            self._app.apply(config)

    async def unload_adapter(self, model: str, name: str) -> None:
        """Remove an adapter that `load_adapter` has added."""
        async with self._lock:
            if (model, name) not in self.adapter_loads:
                return
            self.adapter_loads.remove(model, name)
            config = self._app.services.config
            if (known := config.models.get(model)) is not None:
                adapters = {other: path for other, path in known.adapters.items() if other != name}
                models = config.models | {model: structs.replace(known, adapters=adapters)}
                self._app.apply(structs.replace(config, models=models))

    async def preview(self) -> tuple[Config, ReloadResult]:
        """Return the configuration that a reload would apply, and its changes. Raises `ConfigError`."""
        wanted = await asyncio.to_thread(self._read)
        services = self._app.services
        old = services.config
        new = self.adapter_loads.added_to(with_fixed(wanted, old))
        added = [name for name in new.models if name not in old.models]
        removed = [name for name in old.models if name not in new.models]
        return new, _result(old, new, wanted, AppliedConfig(added, removed, services.pool.would_restart(new)))

    def _apply(self, wanted: Config) -> ReloadResult:
        old = self._app.services.config
        new = self.adapter_loads.added_to(with_fixed(wanted, old))
        applied = self._app.apply(new)
        self.adapter_loads.forget_missing(new)
        if new.server.log_level != old.server.log_level:
            set_level(new.server.log_level)
        done = _result(old, new, wanted, applied)
        log.info("%s: %s", wanted.config_path, describe(done))
        if done.needs_restart:
            log.warning("applied only after a restart of mlxd: %s", ", ".join(done.needs_restart))
        return done


def with_fixed(wanted: Config, old: Config) -> Config:
    """Return `wanted`, but with the current values of the keys that cannot change in a running daemon."""
    server = structs.replace(wanted.server, **{name: getattr(old.server, name) for name in FIXED})
    return structs.replace(wanted, server=server)


def _result(old: Config, new: Config, wanted: Config, applied: AppliedConfig) -> ReloadResult:
    return ReloadResult(
        added=applied.added,
        removed=applied.removed,
        restarted=applied.restarted,
        changed=[*changes(old, new)],
        needs_restart=[*_differences(new.server, wanted.server, "server")],
    )


def changes(old: Config, new: Config) -> Iterator[str]:
    """Yield the keys with different values, such as `server.drain`. Models are compared only if both configurations
    have them.
    """
    for name in ("server", "memory", "media", "batches", "ui"):
        yield from _differences(getattr(old, name), getattr(new, name), name)
    names = old.upstreams | new.upstreams
    yield from (f"upstreams.{name}" for name in names if old.upstreams.get(name) != new.upstreams.get(name))
    for name, model in new.models.items():
        before: ModelConfig | None = old.models.get(name)
        if before is not None:
            yield from _differences(before, model, f"models.{name}")


def describe(done: ReloadResult) -> str:
    """Describe the applied changes in one line."""
    parts = [f"{what} {', '.join(names)}" for what, names in facts_of(done).items() if what != "needs_restart"]
    return "; ".join(parts) or ("nothing is applied now" if done.needs_restart else "nothing has changed")


def facts_of(done: ReloadResult) -> dict[str, list[str]]:
    """Return the changes of a reload by type, without empty types, for the audit log."""
    return {what: names for what, names in structs.asdict(done).items() if names}


def _differences(old: Struct, new: Struct, table: str) -> Iterator[str]:
    for name in new.__struct_fields__:
        if getattr(old, name) != getattr(new, name):
            yield f"{table}.{file_key(name)}"
