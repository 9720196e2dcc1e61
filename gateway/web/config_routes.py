"""The configuration on the page: shown, checked and reloaded, with its difference. The page never writes it."""

import difflib
from typing import Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.config.export import to_json, to_toml
from gateway.config.settings import Config, ConfigError
from gateway.control.commands import Command, note
from gateway.errors import BadRequest, Unavailable
from gateway.http.exchange import send_body
from gateway.reload import Reloader, facts_of
from gateway.services import Services
from gateway.web.schemas import ConfigChecked, ConfigReloaded, ConfigShown

_encode: Final = msgspec.json.Encoder().encode


class Configuration:
    """State that the three endpoints share. The daemon sets `reloader` once it has made one."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.reloader: Reloader | None = None

    def reading(self) -> Reloader:
        """Return the reloader. Raises `Unavailable` without one."""
        if self.reloader is None:
            raise Unavailable("This mlxd has no configuration file to read.", code="no_reloader")
        return self.reloader

    def routes(self, prefix: str) -> list[Route]:
        """Return all routes."""
        return [
            Route(f"{prefix}/config", ShowConfig(self), methods=["GET"]),
            Route(f"{prefix}/config/check", CheckEndpoint(self), methods=["POST"]),
            Route(f"{prefix}/config/reload", ReloadEndpoint(self), methods=["POST"]),
        ]


class ShowConfig:
    """`GET /ui/api/config`."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._configuration.services.config
        shown = ConfigShown(str(config.config_path), to_toml(config), to_json(config))
        await send_body(send, 200, _encode(shown))


class CheckEndpoint:
    """`POST /ui/api/config/check`."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reloader, old = self._configuration.reading(), self._configuration.services.config
        try:
            new, changes = await reloader.preview()
        except ConfigError as error:
            checked = ConfigChecked(False, str(error), error.line)
        else:
            checked = ConfigChecked(True, changes=changes, diff=_diff(old, new))
        await send_body(send, 200, _encode(checked))


class ReloadEndpoint:
    """`POST /ui/api/config/reload`. An invalid file is answered with 400 and changes nothing."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, reloader = self._configuration.services, self._configuration.reading()
        order, old = note(scope, Command("config.reload")), services.config
        try:
            done = await reloader.reload()
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config") from None
        order.facts = facts_of(done)
        await send_body(send, 200, _encode(ConfigReloaded(done, _diff(old, services.config))))


def _diff(old: Config, new: Config) -> str:
    lines = difflib.unified_diff(
        to_toml(old).splitlines(), to_toml(new).splitlines(), "in force", str(new.config_path), lineterm="", n=1
    )
    return "\n".join(lines)
