"""Server side of the web page: its gate, its routes, its feed and its downloads. Each app has one.

The configuration on the web page, which can show, check and reload it but never write it.

Settings of clients for this mlxd, shown on the web page as `mlxctl connect` prints them. No file is written.

API keys on the web page: list, create, rotate, revoke. Only the command line changes admin keys.

Models on the web page: those on this machine, downloads, and those on the hub, which a child process queries.
"""

import asyncio
import difflib
import os
import sys
from collections.abc import Callable
from functools import cached_property, partial
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.caller import OWNER
from gateway.access.key import Key, KeyFile, KeyRefused
from gateway.command_failed import CommandFailed
from gateway.config.address import is_daemon_url
from gateway.config.export import to_json, to_toml
from gateway.config.settings import Config, ConfigError
from gateway.control import endpoints
from gateway.control import endpoints as admin
from gateway.control.commands import AuditedCommand, Command, ModelCommands, get, note, read_order
from gateway.errors import BUSY_RETRY_AFTER_S, ApiError, BadRequest, Forbidden, Overloaded, Unavailable
from gateway.http.bodies import json_response
from gateway.model_files.metadata import ConfiguredModel, list_models
from gateway.model_files.pull_queue import PullQueue
from gateway.reload import Reloader, facts_of
from gateway.request.record import record_of
from gateway.services import Services
from gateway.state_dir import sessions_path
from gateway.web.feed import Feed, Sampler, list_log_lines
from gateway.web.page import LOG_IN, ME
from gateway.web.schemas import (
    ClientSetup,
    ConfigChecked,
    ConfigReloaded,
    ConfigShown,
    HubAnswer,
    HubModels,
    HubOrder,
    KeyFields,
    KeyList,
    KeyOrder,
    KeyRef,
    KeyRevoked,
    KeySecret,
    KeyView,
    ModelFilesList,
    PullOrder,
    Pulls,
)
from gateway.web.session import Entrance, Gate, SessionFile, Sessions, session_of
from gateway.workers.memory.host import ThisMachine


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


# Shown in place of a key, because mlxd does not know the secrets of keys.
YOUR_KEY: Final = "YOUR-KEY"


async def client_setup(services: Services, request: Request) -> Response:
    """Answer `GET /ui/api/connect?client=NAME&model=NAME&url=URL`."""
    query = request.query_params
    url = query.get("url", "").rstrip("/")
    if not is_daemon_url(url):
        raise BadRequest("'url' is mlxd's address, such as http://localhost:8484.", "url", "invalid_value")
    model = services.live.router.resolve(query.get("model", ""), OWNER)
    ready = services.view(model).ready
    context = ready.max_context if ready is not None else model.context
    services.keyring.refresh()
    key = "" if services.keyring.is_open else YOUR_KEY
    try:
        return json_response(await asyncio.to_thread(_setup, query.get("client", ""), url, model.name, context, key))
    except CommandFailed as error:
        raise BadRequest(str(error), "client", "invalid_value") from None


def _setup(client: str, url: str, model: str, context: int, key: str) -> ClientSetup:
    # This import is slow, because it loads the libraries that preserve comments of TOML and YAML.
    from gateway.client_setup.clients import CLIENTS, DEFAULT_CONTEXT, Endpoint, as_data, setup

    data = as_data(setup(client or next(iter(CLIENTS)), Endpoint(url, model, context or DEFAULT_CONTEXT, key)))
    return msgspec.convert(data | {"clients": list(CLIENTS)}, ClientSetup)


T = TypeVar("T")

_key_order: Final = msgspec.json.Decoder(KeyOrder)
_ref: Final = msgspec.json.Decoder(KeyRef)


class Keys:
    """Endpoints for the key file. A thread reads and changes the file, because locks and disks block."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/keys", self._list, methods=["GET"]),
            Route(f"{prefix}/keys/create", self._create, methods=["POST"]),
            Route(f"{prefix}/keys/rotate", self._rotate, methods=["POST"]),
            Route(f"{prefix}/keys/revoke", self._revoke, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        keyring = self._services.keyring
        keyring.refresh()
        keys = await _carry_out(self._file(request.scope).read)
        return json_response(KeyList([self._view(key) for key in keys], keyring.is_open))

    async def _create(self, request: Request) -> Response:
        order = await read_order(request.scope, request.receive, _key_order)
        limits = {name: getattr(order, name) for name in KeyFields.__struct_fields__}
        wanted = Key(name=order.name, prefix="", salt="", hash="", is_metrics_only=order.role == "metrics", **limits)
        file = self._file(request.scope)
        key, secret = await _carry_out(lambda: file.create(wanted, shares_cache=order.shares_cache))
        return json_response(KeySecret(self._view(key), secret))

    async def _rotate(self, request: Request) -> Response:
        key, secret = await self._change(request, KeyFile.rotate)
        return json_response(KeySecret(self._view(key), secret))

    async def _revoke(self, request: Request) -> Response:
        name, left = await self._change(request, lambda file, name: (name, file.revoke(name)))
        return json_response(KeyRevoked(name, left))

    async def _change(self, request: Request, action: Callable[[KeyFile, str], T]) -> T:
        """Change the key that the request names. Raises `Forbidden` for an admin key."""
        name, file = (await read_order(request.scope, request.receive, _ref)).name, self._file(request.scope)

        def change() -> T:
            if any(key.name == name and key.is_admin for key in file.read()):
                raise Forbidden(f"{name} is an admin key: change it with 'mlxctl keys' on the machine itself.")
            return action(file, name)

        return await _carry_out(change)

    def _file(self, scope: Scope) -> KeyFile:
        """Return the key file. It records changes in the audit log as made by this visitor."""
        return KeyFile(self._services.config.keys_path, client=f"ui {session_of(scope).id} {record_of(scope).client}")

    def _view(self, key: Key) -> KeyView:
        numbers = self._services.metrics.keys.get(key.name)
        fields = {name: getattr(key, name) for name in KeyFields.__struct_fields__}
        return KeyView(
            name=key.name,
            prefix=key.prefix,
            role=key.role,
            is_disabled=key.is_disabled,
            shares_cache=not key.cache_salt,
            created=key.created,
            last_used=numbers.last_used if numbers else 0.0,
            requests=sum(numbers.requests.values()) if numbers else 0,
            prompt_tokens=numbers.prompt_tokens if numbers else 0,
            completion_tokens=numbers.generation_tokens if numbers else 0,
            running=numbers.running if numbers else 0,
            rejections=dict(numbers.rejections) if numbers else {},
            **fields,
        )


async def _carry_out(action: Callable[[], T]) -> T:
    """Run an action in a thread. Raises `BadRequest` with the key file's error."""
    try:
        return await asyncio.to_thread(action)
    except KeyRefused as error:
        raise BadRequest(str(error), code="key_refused") from None
    except CommandFailed as error:
        raise BadRequest(str(error), code="keys_unusable") from None


CHILD: Final = (sys.executable, "-P", "-m", "gateway.web.hub_child")
TIMEOUT_S: Final = 90.0
# Maximum number of concurrent queries to the hub. Further queries are refused.
QUERIES_MAX: Final = 2
WORDS_MAX: Final = 16
_TEXT_MAX: Final = 200

_answer: Final = msgspec.json.Decoder(HubAnswer)
_order: Final = msgspec.json.Decoder(PullOrder)


class ModelFinder:
    """Endpoints for models on this machine, models on the hub, and downloads. At most `QUERIES_MAX` child processes
    query the hub.
    """

    def __init__(self, services: Services, downloads: PullQueue) -> None:
        self._services = services
        self._downloads = downloads
        self._running = 0

    def routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/models", self._list_files, methods=["GET"]),
            Route(f"{prefix}/hub/search", self._search, methods=["GET"]),
            Route(f"{prefix}/hub/recommend", self._recommend, methods=["GET"]),
            Route(f"{prefix}/hub/info", self._inspect, methods=["GET"]),
            Route(f"{prefix}/pulls", self._list_or_add_pulls, methods=["GET", "POST"]),
            Route(f"{prefix}/pulls/{{id}}", self._cancel_pull, methods=["DELETE"]),
        ]

    async def _list_files(self, request: Request) -> Response:
        models = self._services.config.models
        known = [
            ConfiguredModel(
                name=view.name,
                path=view.path,
                aliases=models[view.name].aliases,
                dtype=models[view.name].dtype,
                context=models[view.name].context,
                state=str(view.state),
                is_loaded=view.pid != 0,
            )
            for view in self._services.pool.workers()
        ]
        available = self._available_bytes()
        listed = await asyncio.to_thread(list_models, known, available)
        return json_response(ModelFilesList(listed, available))

    async def _search(self, request: Request) -> Response:
        words = request.query_params.get("words", "")[:_TEXT_MAX].split()[:WORDS_MAX]
        if not words:
            raise BadRequest("'words' is what the model's name has.", "words", "invalid_value")
        return json_response(await self._query(HubOrder("search", self._available_bytes(), words)))

    async def _recommend(self, request: Request) -> Response:
        return json_response(await self._query(HubOrder("recommend", self._available_bytes())))

    async def _inspect(self, request: Request) -> Response:
        name = {"repository": request.query_params.get("repository", "")}
        try:
            repository = msgspec.convert(name, PullOrder).repository
        except msgspec.ValidationError:
            raise BadRequest("'repository' is ORG/NAME.", "repository", "invalid_value") from None
        models = await self._query(HubOrder("info", self._available_bytes(), repository=repository))
        return json_response(models.models[0])

    async def _list_or_add_pulls(self, request: Request) -> Response:
        if request.method == "POST":
            return await self._pull(request)
        return json_response(Pulls(self._downloads.views()))

    async def _pull(self, request: Request) -> Response:
        repository = (await read_order(request.scope, request.receive, _order)).repository
        note(request.scope, Command("model.pull", repository))
        return json_response(self._downloads.order(repository), 202)

    async def _cancel_pull(self, request: Request) -> Response:
        pull = self._downloads.cancel(request.path_params["id"])
        note(request.scope, Command("model.pull", pull.repository, {"cancelled": True}))
        return json_response(pull)

    def _available_bytes(self) -> int:
        """Return the memory that one model could have if all others were unloaded for it."""
        memory = self._services.pool.broker.view()
        return min(memory.budget_bytes, ThisMachine().available() + memory.footprint_bytes)

    async def _query(self, order: HubOrder) -> HubModels:
        """Run one query in a child process. Raises `ApiError` with the hub's error."""
        if self._running >= QUERIES_MAX:
            raise Overloaded("Other questions to the hub are running. Try again in a moment.", BUSY_RETRY_AFTER_S)
        self._running += 1
        try:
            answer = await self._child(order)
        finally:
            self._running -= 1
        if answer.models is None:
            raise ApiError(502, f"{answer.error}.", type="hub_error", code="hub_failed")
        return answer.models

    async def _child(self, order: HubOrder) -> HubAnswer:
        environ = os.environ | {"MLXD_HOME": str(self._services.config.home)}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *CHILD, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=environ
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                out, _ = await process.communicate(msgspec.json.encode(order))
        except TimeoutError:
            raise Unavailable("The hub did not answer in time.", code="hub_timeout") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            return _answer.decode(out)
        except msgspec.DecodeError:
            raise Unavailable("The question to the hub failed; 'mlxctl search' says why.", code="hub_failed") from None


PREFIX: Final = "/ui/api"


class Backend:
    """The part of the public app that serves the web page."""

    def __init__(self, services: Services) -> None:
        file = SessionFile(sessions_path(services.config.home))
        self.gate = Gate(Sessions(file.read()), services.live, services.throttle, services.metrics)
        self.entrance = Entrance(services, self.gate, file)
        self.me: ASGIApp = request_response(self.entrance.show_visitor)
        self.sampler = Sampler(services)
        self.downloads = PullQueue(services.tasks, services.config.home)
        self._daemon = admin.DaemonEndpoints(services)
        self.feed = Feed(services, self._daemon.status, self.sampler, self.downloads, self.gate.sessions)
        self._services = services
        self._configuration = Configuration(services)

    async def api(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entrance.save_uses()
        await self._router(scope, receive, send)

    @cached_property
    def _router(self) -> ASGIApp:
        router = Router(self.routes, redirect_slashes=False)
        return AuditedCommand(router, self._services.audit, lambda scope: session_of(scope).id)

    @cached_property
    def routes(self) -> list[Route]:
        """Routes of `/ui/api`. They are made at the first request of a page: many daemons never get one."""
        services = self._services
        return [
            Route(LOG_IN, self.entrance.log_in_or_out, methods=["POST", "DELETE"]),
            Route(ME, self.entrance.show_visitor, methods=["GET"]),
            get(f"{PREFIX}/status", self._daemon.show_status),
            get(f"{PREFIX}/usage", self._daemon.usage_by_day),
            Route(f"{PREFIX}/history", self._show_history, methods=["GET"]),
            Route(f"{PREFIX}/logs", partial(list_log_lines, services), methods=["GET"]),
            Route(f"{PREFIX}/connect", partial(client_setup, services), methods=["GET"]),
            Route(f"{PREFIX}/feed", self.feed, methods=["GET"]),
            *endpoints.request_routes(services, PREFIX),
            *ModelCommands(services, waits=False).routes(PREFIX),
            *ModelFinder(services, self.downloads).routes(PREFIX),
            *self._configuration.routes(PREFIX),
            *Keys(services).routes(PREFIX),
        ]

    def read_with(self, reloader: Reloader) -> None:
        """Set the reloader with which the page checks and reloads the configuration."""
        self._configuration.reloader = reloader

    async def close(self) -> None:
        """End every stream and download when the daemon ends."""
        self.feed.close()
        await self.downloads.close()

    async def _show_history(self, request: Request) -> Response:
        return json_response(self.sampler.charts())
