"""A real gateway for tests: uvicorn on a loopback port, the real pool and link, scripted workers."""

import asyncio
import contextlib
import json
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import uvicorn
from starlette.types import ASGIApp

from gateway.app import App, create_admin_app
from gateway.config.settings import (
    BatchesConfig,
    Config,
    MediaConfig,
    MemoryConfig,
    ModelConfig,
    ServerConfig,
    UpstreamConfig,
    url_of,
)
from gateway.http.connection import GuardedProtocol
from gateway.http.connection_limits import ADDRESS_PART, public_connections
from gateway.http.listen_and_tls import HANDSHAKE_S, Handshake, file_limit
from gateway.link.link import WorkerLink
from gateway.reload import Reloader
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool import Pool
from gateway.workers.supervisor.spawn import default_command
from gateway.workers.supervisor.state import WorkerLimits
from protocol.spec import WorkerSpec
from tests.support.pool import short_home
from tests.support.scale import patient

WORKERS = Path(__file__).parent.parent / "workers"
DEADLINE_S = 60


@dataclass(slots=True)
class Gateway:
    """A running gateway and its parts, for a test to drive and look into."""

    url: str
    port: int
    client: httpx2.AsyncClient
    app: App
    admin: ASGIApp
    pool: Pool
    link: WorkerLink
    metrics: Metrics


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ctrl-C belongs to pytest."""
        yield


def chat(text: str = "hi", /, **fields: Any) -> dict[str, Any]:
    """A chat request of one user message."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 5} | fields


def events(text: str) -> list[Any]:
    """The data of each event of a stream; the end mark stays a string, comments are left out."""
    blocks = [block for block in text.split("\n\n") if block.startswith("data: ")]
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


@asynccontextmanager
async def serving(*models: ModelConfig) -> AsyncGenerator[Gateway, None]:
    """A gateway with real workers, in a home of its own."""
    with short_home() as home:
        async with running(home, models=models, command=default_command) as gateway:
            yield gateway


@asynccontextmanager
async def running(
    home: Path,
    options: Sequence[str] = (),
    models: Sequence[ModelConfig] = (),
    server: ServerConfig | None = None,
    worker: str = "scripted",
    limits: WorkerLimits | None = None,
    command: Callable[[WorkerSpec], list[str]] | None = None,
    protocol: type[GuardedProtocol] = GuardedProtocol,
    handshake_s: float = HANDSHAKE_S,
    address_part: float = ADDRESS_PART,
    connections_max: int = sys.maxsize,
    verify: ssl.SSLContext | bool = True,
    media: MediaConfig | None = None,
    batches: BatchesConfig | None = None,
    memory: MemoryConfig | None = None,
    upstreams: Sequence[UpstreamConfig] = (),
) -> AsyncGenerator[Gateway, None]:
    """A gateway whose workers are scripted with `options`; a `talkative` one also says what it is told.

    With `command` they are whatever that starts. With `tls` of the server the client trusts what `verify` does.
    """
    config = Config(
        home=home,
        server=server or ServerConfig(),
        models={model.name: model for model in models or [ModelConfig(name="m", path="m")]},
        config_path=home / "mlxd.toml",
        media=media or MediaConfig(),
        batches=batches or BatchesConfig(),
        memory=memory or MemoryConfig(),
        upstreams={upstream.name: upstream for upstream in upstreams},
    )
    config.run_dir.mkdir(parents=True, exist_ok=True)
    metrics = Metrics()
    link = WorkerLink(config.run_dir, metrics)
    start = command or _command(WORKERS / f"{worker}.py", options)
    # Last words of a worker come late on a busy machine.
    pool = Pool(config, link, metrics, command=start, limits=limits or WorkerLimits(goodbye_s=patient(0.03)))
    app = App(config, pool, link, metrics)
    await pool.start()
    await app.start()
    # Without the protocol asyncio does not turn Nagle off, and each answer waits 40 ms for an ACK.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    port = listener.getsockname()[1]
    url = url_of(config.server, "127.0.0.1", port)
    connections = public_connections(app.services.live, metrics, file_limit(), address_part, connections_max)
    tls = app.services.tls
    factory = (
        partial(protocol, connections=connections, websockets=app.websockets)
        if tls is None
        else partial(Handshake, connections=connections, tls=tls, handshake_s=handshake_s, websockets=app.websockets)
    )
    http = _Server(
        uvicorn.Config(
            app.entry,
            http=factory,  # type: ignore[arg-type]  # it only calls it
            log_config=None,
            access_log=False,
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    try:
        async with httpx2.AsyncClient(base_url=url, timeout=patient(DEADLINE_S), verify=verify) as client:
            admin = create_admin_app(app, Reloader(app, lambda: config), url, never_drained)
            yield Gateway(url, port, client, app, admin, pool, link, metrics)
    finally:
        http.should_exit = True
        await serving
        with contextlib.closing(listener), contextlib.closing(app):
            app.drain()
            await pool.stop(0.0)
            await app.finish(patient(DEADLINE_S))


async def never_drained(timeout_s: float | None) -> int:
    raise AssertionError("these tests end no daemon")


def _command(worker: Path, options: Sequence[str]) -> Callable[[WorkerSpec], list[str]]:
    def command(spec: WorkerSpec) -> list[str]:
        return [sys.executable, str(worker), spec.name, "--spec", msgspec.json.encode(spec).decode(), *options]

    return command


async def until(condition: Callable[[], bool]) -> None:
    """Poll, with a deadline."""
    async with asyncio.timeout(patient(DEADLINE_S)):
        while not condition():  # noqa: ASYNC110 - what is polled for happens in other processes too
            await asyncio.sleep(0.005)
