"""Putting a changed configuration file into force: it is read and checked as a whole, and a bad one changes nothing."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import msgspec
from msgspec import Struct, structs

from gateway.access.audit_log import Fact
from gateway.adapter_loads import AdapterLoads, with_adapter
from gateway.config.settings import Config, ConfigError, ModelConfig, file_key
from gateway.control_types import ReloadResult
from gateway.errors import Unavailable
from gateway.services import Services
from gateway.telemetry.logs import set_level
from gateway.workers.pool.pool import AppliedConfig

log = logging.getLogger(__name__)

# Settled when the daemon starts: sockets, files and threads depend on them.
FIXED: Final = (
    "host",
    "port",
    "ollama_port",
    "tls",
    "log_format",
    "log_file",
    "log_max_bytes",
    "log_keep",
    "otlp_endpoint",
)


class ReloadTarget(Protocol):
    """Port to the app, which a new configuration is applied to."""

    @property
    def services(self) -> Services: ...
    def apply(self, config: Config) -> AppliedConfig: ...


class Reloader:
    """Reads with `read`, which raises `ConfigError`, and applies what has changed. One reload at a time."""

    def __init__(self, app: ReloadTarget, read: Callable[[], Config]) -> None:
        self._app = app
        self._read = read
        self._lock = asyncio.Lock()
        self.adapter_loads = AdapterLoads()

    async def reload(self) -> ReloadResult:
        """Returns what it did. Models that it restarts or removes may still be at it.

        Raises `ConfigError`, logged, and `Unavailable` when the daemon is about to end.
        """
        async with self._lock:
            try:
                config = await asyncio.to_thread(self._read)
            except ConfigError as error:
                log.error("configuration not reloaded, the previous one stays in force: %s", error)
                raise
            if self._app.services.admission.is_draining:
                # What is started now would outlive us.
                raise Unavailable("The server is shutting down.", code="draining")
            done = self._apply(config)
            if (tls := self._app.services.tls) is not None:
                await tls.refresh()
            return done

    async def load_adapter(self, model: str, name: str, path: str) -> None:
        """Put one more adapter into force until the daemon ends. Raises `NotAllowed`, and `Unavailable` at its end."""
        async with self._lock:
            services = self._app.services
            if services.admission.is_draining:
                raise Unavailable("The server is shutting down.", code="draining")
            config = with_adapter(services.config, model, name, path)
            self.adapter_loads.add(model, name, path)
            self._app.apply(config)

    async def unload_adapter(self, model: str, name: str) -> None:
        """Take out an adapter that `load_adapter` has put in."""
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
        """The configuration that a reload would apply, and what that would change. Raises `ConfigError`."""
        wanted = await asyncio.to_thread(self._read)
        services = self._app.services
        old = services.config
        new = self.adapter_loads.over(with_fixed(wanted, old))
        changes_here = ReloadResult(
            added=[name for name in new.models if name not in old.models],
            removed=[name for name in old.models if name not in new.models],
            restarted=services.pool.would_restart(new),
            changed=[*changes(old, new)],
            needs_restart=[*_ineffective(new, wanted)],
        )
        return new, changes_here

    def _apply(self, wanted: Config) -> ReloadResult:
        old = self._app.services.config
        new = self.adapter_loads.over(with_fixed(wanted, old))
        applied = self._app.apply(new)
        self.adapter_loads.settle(new)
        if new.server.log_level != old.server.log_level:
            set_level(new.server.log_level)
        done = ReloadResult(
            added=applied.added,
            removed=applied.removed,
            restarted=applied.restarted,
            changed=[*changes(old, new)],
            needs_restart=[*_ineffective(new, wanted)],
        )
        log.info("%s: %s", wanted.config_path, describe(done))
        if done.needs_restart:
            log.warning("applied only after a restart of mlxd: %s", ", ".join(done.needs_restart))
        return done


def with_fixed(wanted: Config, old: Config) -> Config:
    """`wanted`, with what cannot change in a running daemon as it is."""
    server = structs.replace(wanted.server, **{name: getattr(old.server, name) for name in FIXED})
    return structs.replace(wanted, server=server)


def _ineffective(new: Config, wanted: Config) -> Iterator[str]:
    """Keys of `wanted` that are not in force."""
    yield from _differences(new.server, wanted.server, "server")


def changes(old: Config, new: Config) -> Iterator[str]:
    """The keys that differ, as `server.drain` and `models.NAME.sampling`, but of models that one of the two lacks."""
    for name in ("server", "memory", "media", "audio", "ui"):
        yield from _differences(getattr(old, name), getattr(new, name), name)
    for table in ("peers", "upstreams"):
        before_all, after_all = getattr(old, table), getattr(new, table)
        yield from (f"{table}.{name}" for name in before_all | after_all if before_all.get(name) != after_all.get(name))
    for name, model in new.models.items():
        before: ModelConfig | None = old.models.get(name)
        if before is not None:
            yield from _differences(before, model, f"models.{name}")


def describe(done: ReloadResult) -> str:
    """In one line."""
    parts = [
        f"{what} {', '.join(names)}"
        for what, names in (
            ("added", done.added),
            ("removed", done.removed),
            ("restarted", done.restarted),
            ("changed", done.changed),
        )
        if names
    ]
    return "; ".join(parts) or ("nothing is applied now" if done.needs_restart else "nothing has changed")


def facts_of(done: ReloadResult) -> dict[str, Fact]:
    """Facts of a reload, for the audit log."""
    lists: dict[str, list[str]] = msgspec.to_builtins(done)
    return {name: names for name, names in lists.items() if names}


def _differences(old: Struct, new: Struct, table: str) -> Iterator[str]:
    for name in new.__struct_fields__:
        if getattr(old, name) != getattr(new, name):
            yield f"{table}.{file_key(name)}"
