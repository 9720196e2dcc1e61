"""The configuration on the web page, which can show, check and reload it but never write it."""

import difflib

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.config.export import to_json, to_toml
from gateway.config.settings import Config, ConfigError
from gateway.control.commands import Command, note
from gateway.errors import BadRequest, Unavailable
from gateway.http.exchange import json_response
from gateway.reload import Reloader, facts_of
from gateway.services import Services
from gateway.web.schemas import ConfigChecked, ConfigReloaded, ConfigShown


class Configuration:
    """Endpoints of `/ui/api/config`. The daemon sets `reloader` once it has made one."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.reloader: Reloader | None = None

    def routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/config", self._show, methods=["GET"]),
            Route(f"{prefix}/config/check", self._check, methods=["POST"]),
            Route(f"{prefix}/config/reload", self._reload, methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        config = self._services.config
        return json_response(ConfigShown(str(config.config_path), to_toml(config), to_json(config)))

    async def _check(self, request: Request) -> Response:
        old = self._services.config
        try:
            new, changes = await self._required_reloader().preview()
        except ConfigError as error:
            return json_response(ConfigChecked(False, str(error), error.line))
        return json_response(ConfigChecked(True, changes=changes, diff=_diff(old, new)))

    async def _reload(self, request: Request) -> Response:
        """Reload the file. An invalid one is answered with 400 and changes nothing."""
        reloader, old = self._required_reloader(), self._services.config
        order = note(request.scope, Command("config.reload"))
        try:
            done = await reloader.reload()
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config") from None
        order.facts = facts_of(done)
        return json_response(ConfigReloaded(done, _diff(old, self._services.config)))

    def _required_reloader(self) -> Reloader:
        if self.reloader is None:
            raise Unavailable("This mlxd has no configuration file to read.", code="no_reloader")
        return self.reloader


def _diff(old: Config, new: Config) -> str:
    lines = difflib.unified_diff(
        to_toml(old).splitlines(), to_toml(new).splitlines(), "in force", str(new.config_path), lineterm="", n=1
    )
    return "\n".join(lines)
