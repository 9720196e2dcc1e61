"""Parts of a running gateway that a generation uses."""

from dataclasses import dataclass

from gateway.access.ledger import Ledger
from gateway.config.settings import Config, ModelConfig
from gateway.link.link import WorkerLink
from gateway.request.admission import Admission
from gateway.request.in_flight import Requests
from gateway.request.next_turns import NextTurns
from gateway.request.recent_requests import RecentRequests
from gateway.request.routing import LiveConfig, Router
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool.pool import Pool
from gateway.workers.supervisor.state import State, WorkerView


@dataclass(frozen=True, slots=True)
class Runtime:
    """Parts of the gateway that a generation uses. They are made once per app, as the first part of its `Services`."""

    live: LiveConfig
    pool: Pool
    link: WorkerLink
    metrics: Metrics
    admission: Admission
    requests: Requests
    recent: RecentRequests
    ledger: Ledger
    next_turns: NextTurns

    @property
    def config(self) -> Config:
        """The current configuration."""
        return self.live.config

    def view(self, model: ModelConfig) -> WorkerView:
        """Return the state of a resolved model."""
        worker = self.pool.find(model.name)
        return WorkerView(name=model.name, path=model.path, state=State.STOPPED) if worker is None else worker.view()

    @property
    def router(self) -> Router:
        """Router of the current configuration."""
        return self.live.router
