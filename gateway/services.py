"""What the endpoints work with, made once per app."""

from dataclasses import dataclass

from gateway.admission import Admission
from gateway.auth import Keyring
from gateway.config import Config
from gateway.keys import KeyFile
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.pool.pool import Pool
from gateway.requests import Requests
from gateway.routing import Router


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of a running gateway."""

    config: Config
    pool: Pool
    link: Link
    metrics: Metrics
    router: Router
    admission: Admission
    keyring: Keyring
    requests: Requests

    @classmethod
    def make(cls, config: Config, pool: Pool, link: Link, metrics: Metrics) -> "Services":
        """Raises `KeysUnusable`."""
        metrics.declare(config.models)
        keyring = Keyring(KeyFile(config.keys_path), metrics)
        return cls(config, pool, link, metrics, Router(config.models), Admission(metrics.rejected), keyring, Requests())
