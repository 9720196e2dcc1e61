"""Services that the endpoints work with, made once per app."""

from dataclasses import dataclass

from gateway.admission import Admission
from gateway.audit import Audit
from gateway.audittrail import AuditTrail
from gateway.auth import Keyring
from gateway.bodies import Bodies, memory_bytes
from gateway.capture import Captures
from gateway.config import Config, audit_path
from gateway.keyaddresses import KeyAddresses
from gateway.keys import KeyFile
from gateway.ledger import Ledger
from gateway.link import Link
from gateway.live import Live
from gateway.metrics import Metrics
from gateway.periods import zone_of
from gateway.pool.pool import Pool
from gateway.requests import Requests
from gateway.routing import Router
from gateway.strangers import Sample, Throttle
from gateway.tls import Tls
from gateway.tracing import Tracer
from gateway.usage import UsageFile


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running gateway."""

    live: Live
    pool: Pool
    link: Link
    metrics: Metrics
    admission: Admission
    bodies: Bodies
    keyring: Keyring
    audit: AuditTrail
    addresses: KeyAddresses
    throttle: Throttle
    sample: Sample
    requests: Requests
    captures: Captures
    usage: UsageFile
    ledger: Ledger
    tracer: Tracer | None
    tls: Tls | None

    @classmethod
    def make(cls, config: Config, pool: Pool, link: Link, metrics: Metrics) -> "Services":
        """Raises `KeysUnusable` and `CertificateUnusable`."""
        metrics.declare(config.models)
        metrics.unacked_aborts = lambda: link.aborts.count
        live = Live(config)
        metrics.has_vllm_names = lambda: live.config.server.metrics_compat == "vllm"
        trail = AuditTrail(Audit(config.home))
        metrics.audit_lines_lost = lambda: trail.lost
        ledger = Ledger(
            config.ledger_dir,
            lambda: zone_of(live.config.server.time_zone),
            lambda: live.config.server.usage_months,
        )
        keyring = Keyring(KeyFile(config.keys_path), metrics, ledger=ledger)
        bodies = Bodies(lambda: memory_bytes(live.config.server))
        metrics.body_numbers = bodies.numbers
        return cls(
            live=live,
            pool=pool,
            link=link,
            metrics=metrics,
            admission=Admission(metrics.rejected),
            bodies=bodies,
            keyring=keyring,
            audit=trail,
            addresses=KeyAddresses(trail, audit_path(config.home), keyring.prefixes),
            throttle=Throttle(lambda: live.config.server),
            sample=Sample(),
            requests=Requests(),
            captures=Captures(config.capture_dir, lambda: live.config.server),
            usage=UsageFile(config.usage_path, metrics, meters=keyring.meters),
            ledger=ledger,
            tracer=_tracer(config.server.otlp_endpoint),
            tls=Tls(config.server.tls, metrics) if config.server.tls.certificate else None,
        )

    @property
    def config(self) -> Config:
        """The one in force now."""
        return self.live.config

    @property
    def router(self) -> Router:
        """The names in force now."""
        return self.live.router

    def close(self) -> None:
        """Finish writing and sending. The last call."""
        self.sample.tell()
        self.bodies.close()
        self.usage.close()
        self.ledger.close()
        self.captures.close()
        self.audit.close()
        if self.tracer is not None:
            self.tracer.close()


def _tracer(endpoint: str) -> Tracer | None:
    if not endpoint:
        return None
    # Only where it is wanted: OpenTelemetry is an extra, and takes a third of a second to import.
    from gateway import otel

    return otel.Tracer(endpoint)
