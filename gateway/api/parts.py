"""Parts of the public API of which its endpoints are made, and the makers that the table of operations names."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp

from gateway.api.common.catalog import Catalog
from gateway.api.ollama.pull_stream import DownloadQueue
from gateway.api.responses.endpoints import Responses
from gateway.remote.upstreams.upstream import UpstreamFallback
from gateway.services import Services


@dataclass(frozen=True, slots=True)
class Parts:
    """Made once per public app."""

    services: Services
    catalog: Catalog
    responses: Responses
    downloads: DownloadQueue


# Makes an operation's endpoint; operations of one path and maker share the endpoint.
Maker = Callable[[Parts], ASGIApp]


def served(endpoint: Callable[[Services], ASGIApp]) -> Maker:
    """An endpoint that needs nothing but the services."""
    return lambda parts: endpoint(parts.services)


def or_upstream(endpoint: Callable[[Services], ASGIApp], dialect: str) -> Maker:
    """The same, whose requests may go to an upstream."""
    return lambda parts: UpstreamFallback(endpoint(parts.services), parts.services, dialect)


def listed(endpoint: Callable[[Catalog], ASGIApp]) -> Maker:
    """An endpoint that lists the catalog of models."""
    return lambda parts: endpoint(parts.catalog)
