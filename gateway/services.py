"""Services that the endpoints and the middleware of an app share."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import httpx2

from gateway.access.audit_log import Audit, AuditTrail
from gateway.access.key import KeyFile
from gateway.access.keyring import KeyAddresses, Keyring
from gateway.access.ledger import Ledger
from gateway.access.rate_limit import LogSample, Throttle
from gateway.access.usage import UsageFile
from gateway.config.settings import Config
from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, single_thread
from gateway.http.capture import Captures
from gateway.http.listen_and_tls import Tls
from gateway.link.link import WorkerLink
from gateway.media.documents import PdfReader
from gateway.media.read_media import Fetch, InFlightBytes, bounded, fetch_public
from gateway.remote.upstreams.upstream_client import Clients
from gateway.request.admission import Admission, BatchGate, LoadMeter
from gateway.request.body_memory import Bodies, memory_bytes, quota_bytes
from gateway.request.in_flight import RecentRequests, Requests
from gateway.request.next_turns import NextTurns
from gateway.request.opener import Runtime
from gateway.request.record import RequestRecord
from gateway.request.routing import LiveConfig
from gateway.state_dir import audit_path
from gateway.task_set import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool import Pool


class SpanTracer(Protocol):
    """The part of `otel.OtelTracer` that the services use. It exports spans of requests."""

    def export(self, record: RequestRecord) -> str:
        """Queue the spans of an ended request, and return the id of its trace."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Services(Runtime):
    """The runtime with keys, logs, captures and traces."""

    bodies: Bodies
    media: InFlightBytes
    # `fetch` gets an image, video or audio by its URL.
    fetch: Fetch
    pdfs: PdfReader
    keyring: Keyring
    audit: AuditTrail
    addresses: KeyAddresses
    throttle: Throttle
    sample: LogSample
    captures: Captures
    usage: UsageFile
    tracer: SpanTracer | None
    tls: Tls | None
    tasks: TaskSet
    upstreams: Clients
    batch_gate: BatchGate
    # Clock for requests and rate limits.
    clock: Callable[[], float]

    @classmethod
    def make(
        cls,
        config: Config,
        pool: Pool,
        link: WorkerLink,
        metrics: Metrics,
        tracer: SpanTracer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        make_thread: MakeThread = single_thread,
        disk: Disk = SYSTEM_DISK,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> "Services":
        """Make the services for a configuration. Raises `KeysUnusable` and `CertificateUnusable`."""
        live = LiveConfig(config, pool.ready_epoch)
        trail = AuditTrail(Audit(config.home, disk=disk), make_thread)
        _show(metrics, live, link, trail)
        ledger = Ledger(config.ledger_dir, disk=disk)
        keyring = Keyring(KeyFile(config.keys_path), metrics, clock, ledger=ledger)
        admission, requests, tasks = Admission(metrics.rejected, clock), Requests(), TaskSet(metrics.unhandled_error)
        meter = LoadMeter(pool, requests, admission, metrics)
        metrics.loads = lambda: [
            (model.name, load.backlog_tokens, load.wait_s)
            for model, load in ((model, meter.read(model)) for model in live.config.models.values())
        ]
        bodies = Bodies(
            lambda: memory_bytes(live.config.server), lambda: quota_bytes(live.config.server, keyring.has_others)
        )
        metrics.body_numbers = bodies.numbers
        media = InFlightBytes(lambda: keyring.has_others)
        metrics.media_numbers = media.numbers
        return cls(
            live=live,
            pool=pool,
            link=link,
            metrics=metrics,
            admission=admission,
            upstreams=Clients(transport),
            batch_gate=BatchGate(admission, pool, clock=clock),
            clock=clock,
            bodies=bodies,
            media=media,
            fetch=bounded(fetch_public(), media.numbers),
            pdfs=PdfReader(),
            keyring=keyring,
            audit=trail,
            addresses=KeyAddresses(trail, audit_path(config.home), keyring.prefixes),
            throttle=Throttle(clock),
            sample=LogSample(clock),
            requests=requests,
            recent=RecentRequests(),
            captures=Captures(config.capture_dir, lambda: live.config.server),
            usage=UsageFile(config.usage_path, metrics, meters=keyring.meters, disk=disk),
            ledger=ledger,
            next_turns=NextTurns(live, pool, link, metrics),
            tracer=tracer,
            tls=Tls(config.server.tls, metrics) if config.server.tls.certificate else None,
            tasks=tasks,
        )

    def close(self) -> None:
        """Finish writing files and sending spans. No method may be called after this."""
        self.sample.log_counts()
        self.bodies.close()
        self.usage.close()
        self.ledger.close()
        self.captures.close()
        self.audit.close()
        if self.tracer is not None:
            self.tracer.close()


def _show(metrics: Metrics, live: LiveConfig, link: WorkerLink, trail: AuditTrail) -> None:
    """Let the metrics show what others count."""
    metrics.declare(live.config.models)
    metrics.unacked_aborts = lambda: link.unacked_aborts
    metrics.audit_lines_lost = lambda: trail.lost
