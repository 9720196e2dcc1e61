"""`POST /api/pull`: the progress of a download, in lines as Ollama sends them.

Pulls share a queue with the downloads of the web page.
"""

import asyncio
import re
from typing import Final

import msgspec
from msgspec import UNSET
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.ollama.load_orders import authorize
from gateway.api.ollama.request import decode_pull
from gateway.api.ollama.response import ErrorLine, PullLine
from gateway.errors import ApiError, BadRequest, ModelNotFound, Unavailable
from gateway.http.exchange import send_body
from gateway.http.sse import JSON_LINES, StreamWatch, cut_off
from gateway.model_files.metadata import Unreadable, find
from gateway.model_files.pull_queue import PullQueue, PullStatus
from gateway.request.headers import ignored_header
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services

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
            path = self._services.router.locate(name, record.caller).model.path
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
        timeout_s = self._services.config.server.write_timeout_s
        async with cut_off(record, receive, timeout_s) as watch:
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
