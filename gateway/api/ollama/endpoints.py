"""`POST /api/chat` and `POST /api/generate`. Without a prompt, a request loads or unloads its model.

Loads and unloads a model for Ollama requests without a prompt, and authorizes administrative requests.

Unloading and downloading a model need an admin key. While there are no keys, every program on this machine may use the
models, but none may administer them.

`POST /api/pull`: the progress of a download, in lines as Ollama sends them.

Pulls share a queue with the downloads of the web page.
"""

import asyncio
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from gateway.access.audit_log import Action, AuditActor, entry
from gateway.api.common import serve
from gateway.api.common.request_fields import extras_of
from gateway.api.ollama.request import (
    GenerateRequest,
    GenerationFields,
    OllamaChatRequest,
    check_load,
    conversation_of,
    decode_chat,
    decode_generate,
    decode_pull,
    is_empty,
    lower_chat,
    lower_generate,
    read_options,
)
from gateway.api.ollama.response import ChatForm, ErrorLine, GenerateForm, LineFold, LineForm, LineStream, PullLine
from gateway.config.settings import ModelConfig
from gateway.errors import ApiError, BadRequest, Forbidden, ModelNotFound, Unavailable, from_failure
from gateway.http.bodies import JSON, send_body
from gateway.http.sse import JSON_LINES, StreamWatch, cut_off
from gateway.model_files.metadata import Unreadable, find
from gateway.model_files.pull_queue import PullQueue, PullStatus
from gateway.request.opener import not_ready
from gateway.request.record import ClientLeft, RequestRecord, ignored_header, record_of
from gateway.services import Services
from gateway.workers.supervisor.state import ModelUnavailable
from protocol.to_worker import Generate

LOADED: Final = "load"
UNLOADED: Final = "unload"


async def load_or_unload(
    services: Services, record: RequestRecord, model: ModelConfig, receive: Receive, *, is_last: bool
) -> str:
    """Load the model, or unload it if `is_last`. Returns Ollama's `done_reason`.

    Any caller may load the model, as any request does. Unloading affects all callers. Raises `ApiError` and
    `ClientLeft`.
    """
    try:
        async with cut_off(record, receive):
            if is_last:
                authorize(services, record, "model.unload", model.name, "Unloading a model")
                await services.pool.unload(model.name)
                return UNLOADED
            await _load(services, record, model)
            return LOADED
    except ModelUnavailable as error:
        raise from_failure(error.failure, error.retry_after_s, is_operator=record.caller.is_admin) from None
    raise ClientLeft


async def _load(services: Services, record: RequestRecord, model: ModelConfig) -> None:
    caller, queue_s = record.caller, services.config.server.queue_timeout_s
    quota_percent = caller.queue_quota_percent
    with ExitStack() as held:
        held.enter_context(services.admission.lease(model, 1, caller.key, quota_percent))
        held.enter_context(services.pool.broker.lease(model.name))
        try:
            async with asyncio.timeout(queue_s or None):
                await services.pool.ensure_ready(model.name)
        except TimeoutError:
            raise not_ready(services.pool, model, queue_s) from None


def authorize(services: Services, record: RequestRecord, action: Action, target: str, what: str) -> None:
    """Check that the caller may give an administrative command, and record it in the audit log. Raises `Forbidden`."""
    caller = record.caller
    if caller.key is None or not caller.is_admin:
        raise Forbidden(f"{what} needs an admin key: mlxctl keys create NAME --admin")
    line = entry(action, target, client=str(record.client), actor=AuditActor(), facts={"key": caller.key})
    services.audit.record(line)


# Progress is checked at this interval, and written if it has changed or a keep-alive is due.
CHECK_INTERVAL_S: Final = 0.5
KEEPALIVE_S: Final = 10.0
# Ollama's clients may put these hosts before a repository's name.
_HOSTS: Final = ("hf.co/", "huggingface.co/")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95}")
_SUCCESS: Final = PullLine("success")

_encode: Final = msgspec.json.Encoder().encode


class PullEndpoint:
    """ASGI endpoint of pulls. If its client leaves, the download continues; the web page or another pull
    can follow it.
    """

    def __init__(self, services: Services, downloads: PullQueue) -> None:
        self._services = services
        self._downloads = downloads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_pull)
        record.headers = ignored_header(unknown)
        path = await asyncio.to_thread(self._path_to_download, request.wanted, record)
        download = None
        if path is not None:
            authorize(services, record, "model.pull", path[:200], "Downloading a model")
            download = self._downloads.order(repository_of(path))
        if request.stream is False:
            await self._whole(download, record, receive, send)
        else:
            await self._stream(download, record, receive, send)

    def _path_to_download(self, name: str, record: RequestRecord) -> str | None:
        """Return the path of a configured model, or `name` itself if the caller has no such model. Returns None if the
        files are on this machine.
        """
        try:
            path = self._services.live.router.locate(name, record.caller).model.path
        except ModelNotFound:
            return name
        try:
            find(path)
        except Unreadable:
            return path
        return None

    async def _whole(self, download: PullStatus | None, record: RequestRecord, receive: Receive, send: Send) -> None:
        async with cut_off(record, receive):
            while download is not None and not download.has_ended:
                await asyncio.sleep(CHECK_INTERVAL_S)
                download = self._now(download)
            if download is not None and download.state != "done":
                raise Unavailable(_failure(download), code="pull_failed")
            await send_body(send, 200, _encode(_SUCCESS), record.headers)

    async def _stream(self, download: PullStatus | None, record: RequestRecord, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", JSON_LINES), (b"cache-control", b"no-cache"), *record.headers]
        async with cut_off(record, receive) as watch:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await _write(send, watch, PullLine("pulling manifest"))
            last, silent_s = None, 0.0
            while download is not None:
                line = _progress(download)
                if line != last or silent_s >= KEEPALIVE_S:
                    await _write(send, watch, line)
                    last, silent_s = line, 0.0
                if download.has_ended:
                    break
                await asyncio.sleep(CHECK_INTERVAL_S)
                silent_s += CHECK_INTERVAL_S
                try:
                    download = self._now(download)
                except ApiError as error:
                    record.outcome = error.outcome
                    await _write(send, watch, ErrorLine(error.message), more=False)
                    return
            is_here = download is None or download.state == "done"
            end = _SUCCESS if is_here else ErrorLine(_failure(download) if download is not None else "")
            await _write(send, watch, end, more=False)

    def _now(self, download: PullStatus) -> PullStatus:
        """Return the current state of a download. Raises `ApiError` once it is no longer listed."""
        for view in self._downloads.views():
            if view.id == download.id:
                return view
        raise ApiError(404, f"The download of {download.repository} is not listed any more.", code="pull_not_found")


def repository_of(name: str) -> str:
    """Return the repository that a name stands for in Ollama's spelling. Raises `BadRequest`."""
    for host in _HOSTS:
        name = name.removeprefix(host)
    name = name.removesuffix(":latest")
    if not _REPOSITORY.fullmatch(name):
        raise BadRequest(
            f"{name[:100]!r} is no repository of the Hugging Face hub, such as mlx-community/Qwen3-8B-4bit. Models of "
            "Ollama's library are not in a form that MLX loads.",
            "model",
            "invalid_value",
        )
    return name


def _progress(download: PullStatus) -> PullLine:
    if not download.total_bytes:
        return PullLine(f"pulling {download.repository}" if download.state == "running" else "waiting")
    done = min(download.downloaded_bytes, download.total_bytes)
    return PullLine(f"pulling {download.repository}", download.id, download.total_bytes, done or UNSET)


def _failure(download: PullStatus) -> str:
    return download.message or f"The download of {download.repository} has ended: {download.state}."


async def _write(send: Send, watch: StreamWatch, line: PullLine | ErrorLine, *, more: bool = True) -> None:
    await watch.write(send, _encode(line) + b"\n", more=more)


R = TypeVar("R", bound=GenerationFields)


class Chat:
    """ASGI endpoint of `POST /api/chat`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def make_form(request: OllamaChatRequest, name: str, record: RequestRecord) -> LineForm:
            return ChatForm(name, record, extras_of(request.x_mlxd, record))

        await _respond(self._services, scope, receive, send, decode_chat, lower_chat, make_form)


class Complete:
    """ASGI endpoint of `POST /api/generate`."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def make_form(request: GenerateRequest, name: str, record: RequestRecord) -> LineForm:
            has_turns = not (request.raw or request.suffix or is_empty(request))
            turns = conversation_of(request) if has_turns else None
            return GenerateForm(name, record, turns, extras_of(request.x_mlxd, record))

        await _respond(self._services, scope, receive, send, decode_generate, lower_generate, make_form)


async def _respond(
    services: Services,
    scope: Scope,
    receive: Receive,
    send: Send,
    decode: Callable[[bytes], tuple[R, list[str]]],
    lower: Callable[[R, ModelConfig, Callable[[], int], int, int], Generate],
    make_form: Callable[[R, str, RequestRecord], LineForm],
) -> None:
    record = record_of(scope)
    request, ignored = await serve.read(services, record, scope, receive, decode)
    options, _ = read_options(request.options)
    model, seed = serve.begin(services, record, request.model, request.is_stream, options.wanted_seed, ignored)
    form = make_form(request, request.model or model.name, record)
    if is_empty(request):
        check_load(request, model)
        reason = await load_or_unload(services, record, model, receive, is_last=request.is_last)
        # The single line is also the whole stream, if the request asks for a stream.
        body = msgspec.json.encode(form.loaded(reason)) + (b"\n" if request.is_stream else b"")
        await send_body(send, 200, body, record.headers, JSON_LINES if request.is_stream else JSON)
        return
    job = await serve.prepare(services, record, model, lambda next_rid, ms: lower(request, model, next_rid, seed, ms))
    if request.is_stream:
        await job.stream(LineStream(form), receive, send, JSON_LINES)
    else:
        await job.whole(LineFold(form), receive, send)
