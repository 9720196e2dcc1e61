"""The parts of a running gateway that serve a generation."""

from dataclasses import dataclass

from gateway.access.ledger import Ledger
from gateway.config.settings import Config
from gateway.link.link import Link
from gateway.pool import Pool
from gateway.request.admission import Admission
from gateway.request.in_flight import Requests
from gateway.request.routing import Live, Router
from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Runtime:
    """Made once per app, as the first part of its `Services`."""

    live: Live
    pool: Pool
    link: Link
    metrics: Metrics
    admission: Admission
    requests: Requests
    ledger: Ledger

    @property
    def config(self) -> Config:
        """The configuration in force now."""
        return self.live.config

    @property
    def router(self) -> Router:
        """The names in force now."""
        return self.live.router
