"""Running daemon: its pool, public server and admin server, from start to drain."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Final

import uvicorn

from gateway.access.audit_log import AuditActor, Fact, entry
from gateway.app import App, create_admin_app
from gateway.config.address import from_here
from gateway.config.settings import CAN_HOLD_AWAKE, Config, ConfigError, ServerConfig, url_of
from gateway.errors import Unavailable
from gateway.http.connection_limits import admin_connections, public_connections
from gateway.http.listen_and_tls import (
    BACKLOG,
    CannotListen,
    close_all,
    file_limit,
    listen_tcp,
    listen_unix,
    listener_protocol,
)
from gateway.link.link import WorkerLink
from gateway.reload import Reloader, facts_of, limit_prefixes
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool import Pool
from gateway.workers.power import Awake, DesktopWatch, make_probe
from gateway.workers.supervisor.spawn import Command, default_command
from gateway.workers.supervisor.state import State

log = logging.getLogger(__name__)

# Number of allocations between two collections of young objects. Python's default of 700 is reached every few dozen
# tokens.
GC_ALLOCATIONS: Final = 20_000
# A thread that works on a large body yields to the event loop after this time. Python's default is 5 ms, and several
# such delays add up.
THREAD_SWITCH_S: Final = 0.001
# Once every worker has stopped, answers that are still being written get this much time.
FLUSH_S: Final = 5
# This is longer than the idle time of clients' connection pools, so the server never closes a connection while a client
# sends on it.
KEEP_ALIVE_S: Final = 75

_LOADING: Final = frozenset({State.STARTING, State.LOADING})
# During a drain, requests for models in these states run until the deadline. All others are cut off immediately.
_RUNNING: Final = frozenset({State.READY, State.DRAINING})
_WAITING: Final = frozenset(State) - _RUNNING


class Daemon:
    """One daemon in a locked home. SIGTERM or SIGINT drains it; a second such signal ends it immediately.

    SIGHUP reloads the configuration. It is ignored if it comes because the daemon's own terminal closes. SIGUSR2 hands
    over: running requests finish, and the workers stay, with their models loaded, for the next daemon.
    """

    def __init__(self, config: Config, read: Callable[[], Config], *, command: Command = default_command) -> None:
        """Open all sockets. `read` reads the configuration file again for a reload.

        Raises `PathTooLong`, `CannotListen`, `TooFewFiles`, `KeysUnusable` and `CertificateUnusable`.
        """
        metrics = Metrics()
        link = WorkerLink(config.run_dir, metrics)
        self._pool = Pool(config, link, metrics, command=command)
        self._app = App(config, self._pool, link, metrics)
        live = self._app.services.live
        clients = public_connections(live, metrics, file_limit())
        self._reloader = Reloader(self._app, read)
        self._app.backend.read_with(self._reloader)
        self._sampler = self._app.backend.sampler
        self._public_sockets = _listen(config.server)
        admin = create_admin_app(self._app, self._reloader, self.url, self.drain)
        try:
            self._admin_socket = listen_unix(config.admin_socket)
        except CannotListen:
            close_all(self._public_sockets)
            raise
        owners = admin_connections(live, metrics)
        public = listener_protocol(clients, self._app.services.tls, self._app.websockets)
        protocols = public, listener_protocol(owners, None)
        self._servers = [
            _Server(server_settings(*each)) for each in zip((self._app.entry, admin), protocols, strict=True)
        ]
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        # The deadline of the drain command in seconds; None if the command gave none.
        self._drain_s: float | None = None
        self._drained = asyncio.Event()
        self._cut_off = 0

    @property
    def url(self) -> str:
        host, port = self._public_sockets[0].getsockname()[:2]
        return url_of(self._app.services.config.server, host, port)

    async def drain(self, timeout_s: float | None) -> int:
        """End as after SIGTERM, with another deadline for running requests. Returns how many requests were cut off."""
        # A second command, unlike a second signal, does not end the daemon immediately.
        if not self._app.services.admission.is_draining:
            self._app.drain()
            self._drain_s = timeout_s
            self._signals.put_nowait(signal.SIGTERM)
        await self._drained.wait()
        return self._cut_off

    async def run(self) -> None:
        """Serve until a signal or the drain command. Raises the error of a broken pool or server."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # nohup ignores SIGHUP, so that a closed terminal has no effect.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._signals.put_nowait, signum)
        had_terminal = _has_terminal()
        loop.add_signal_handler(signal.SIGUSR2, self._signals.put_nowait, signal.SIGUSR2)
        try:
            await self._pool.start()
            await self._app.start()
            services = self._app.services
            services.tasks.start(limit_prefixes(services.config), "limit of the prefix cache")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pool.wait())
                for server, sockets in zip(self._servers, (self._public_sockets, [self._admin_socket]), strict=True):
                    tasks.create_task(server.serve(sockets))
                running = (
                    services.usage.run(),
                    services.ledger.run(),
                    services.captures.run(),
                    services.sample.run(),
                    self._sampler.run(),
                    *([] if services.tls is None else [services.tls.run()]),
                    *self._wakefulness(),
                    self._desktop().run(),
                )
                chores = [tasks.create_task(chore) for chore in running]
                _tune_garbage_collector()
                count = len(services.config.models)
                log.info("mlxd serves %d model%s on %s", count, "" if count == 1 else "s", self.url)
                self._greet()
                while (signum := await self._signals.get()) is signal.SIGHUP and _has_terminal() is had_terminal:
                    await self._reload()
                await (self._hand_over() if signum is signal.SIGUSR2 else self._drain(signum))
                await self._app.finish(FLUSH_S)
                for chore in chores:
                    chore.cancel()
        finally:
            self._app.close()
            self._app.services.config.admin_socket.unlink(missing_ok=True)

    def _greet(self) -> None:
        """Print the page's link on a terminal. It is not logged, because the log files would keep its code."""
        backend = self._app.backend
        if sys.stderr.isatty() and self._app.services.config.ui.admin != "off":
            link = f"{from_here(self.url)}/ui/#code={backend.gate.sessions.make_code()}"
            # The text is one write, because a thread writes the log to the same terminal.
            text = f"Open the page within a minute, or later with 'mlxctl ui':\n  {link}\n"
            print(text, end="", file=sys.stderr, flush=True)

    def _wakefulness(self) -> Iterator[Coroutine[None, None, None]]:
        if CAN_HOLD_AWAKE:
            services = self._app.services
            yield Awake(lambda: services.config.server.prevent_sleep, self._is_busy).run()

    def _desktop(self) -> DesktopWatch:
        services = self._app.services
        watch = DesktopWatch(lambda: services.config.server.desktop, self._pool.handles, probe=make_probe())
        services.metrics.gpu_duty_ratio = lambda: watch.duty_cycle
        return watch

    def _is_busy(self) -> bool:
        services = self._app.services
        return services.link.in_flight > 0 or any(view.state in _LOADING for view in services.pool.workers())

    async def _reload(self) -> None:
        outcome, facts = "ok", dict[str, Fact]()
        try:
            facts = facts_of(await self._reloader.reload())
        except ConfigError:
            outcome = "bad_config"  # `reload` has logged the error.
        except Unavailable:
            outcome = "draining"
        except Exception:  # Nothing awaits this task, so the error is logged here.
            outcome = "internal"
            self._app.services.metrics.unhandled_errors += 1
            log.exception("the configuration could not be reloaded")
        # The sender of a signal is unknown, so the entry has no actor.
        self._app.services.audit.record(
            entry("config.reload", outcome=outcome, client="signal", actor=AuditActor(), facts=facts)
        )

    async def _drain(self, signum: signal.Signals) -> None:
        drain_s = self._app.services.config.server.drain_s if self._drain_s is None else self._drain_s
        log.info("%s: draining for up to %g s; a second signal ends it at once", signum.name, drain_s)
        self._app.drain()
        self._count_cut_off(_WAITING)
        impatience = asyncio.create_task(self._hurry())
        overdue = asyncio.get_running_loop().call_later(drain_s, self._count_cut_off, _RUNNING)
        try:
            await self._app.stop(drain_s)
        finally:
            impatience.cancel()
            overdue.cancel()
        self._drained.set()
        for server in self._servers:
            server.should_exit = True
        log.info("mlxd has stopped")

    def _count_cut_off(self, states: frozenset[State]) -> None:
        services = self._app.services
        views = (view for view in services.pool.workers() if view.state in states)
        self._cut_off += sum(services.admission.inside(view.name) for view in views)

    async def _hand_over(self) -> None:
        drain_s = self._app.services.config.server.drain_s
        log.info("handing over within %g s: no new requests, workers keep running; a signal ends the wait", drain_s)
        self._app.drain()
        await self._app.hand_over(drain_s, asyncio.create_task(self._next_end()))
        for server in self._servers:
            server.should_exit = True
        log.info("mlxd has handed over")

    async def _hurry(self) -> None:
        signum = await self._next_end()
        log.warning("%s again: stopping now", signum.name)
        for server in self._servers:
            server.force_exit = True
        await self._pool.stop_now()

    async def _next_end(self) -> signal.Signals:
        """Wait for the next signal other than SIGHUP. A daemon that is ending does not reload."""
        while (signum := await self._signals.get()) is signal.SIGHUP:
            log.info("SIGHUP while ending: the configuration is not reloaded")
        return signum


def _listen(server: ServerConfig) -> list[socket.socket]:
    """Open the public sockets, those of `port` first. Raises `CannotListen`."""
    sockets = listen_tcp(server.host, server.port)
    if server.ollama_port:
        try:
            sockets += listen_tcp(server.host, server.ollama_port)
        except CannotListen as error:
            close_all(sockets)
            raise CannotListen(f"[server] ollama_port: {error}; Ollama itself listens on 11434") from None
    return sockets


class _Server(uvicorn.Server):
    """Server that does not handle signals: the daemon does."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def server_settings(app: object, protocol: Callable[..., asyncio.Protocol]) -> uvicorn.Config:
    """Return uvicorn's settings for one of the daemon's two servers."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # uvicorn's own ASGI types are narrower than starlette's
        loop="uvloop",
        http=protocol,  # type: ignore[arg-type]  # it only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
    )


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal that is open. A service has none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _tune_garbage_collector() -> None:
    """Make garbage collection rare and exempt all existing objects, which live as long as the daemon."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_ALLOCATIONS, 20, 20)
    sys.setswitchinterval(THREAD_SWITCH_S)
