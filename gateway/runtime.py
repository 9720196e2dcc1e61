"""The parts of a running gateway that serve a generation."""

from dataclasses import dataclass

from gateway.admission import Admission
from gateway.config import Config
from gateway.ledger import Ledger
from gateway.link import Link
from gateway.live import Live
from gateway.metrics import Metrics
from gateway.pool.pool import Pool
from gateway.requests import Requests
from gateway.routing import Router


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
