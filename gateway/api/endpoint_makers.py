"""Parts from which the endpoints of the public API are made. The tables of operations refer to makers of endpoints."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.batches.batches import Batches
from gateway.api.batches.files import FileEndpoints
from gateway.api.batches.openai_and_message_batches import MessageBatches, OpenAIBatches
from gateway.api.common.catalog import Catalog
from gateway.api.responses.endpoints import Responses
from gateway.model_files.pull_queue import PullQueue
from gateway.remote.upstreams.upstream import UpstreamFallback
from gateway.services import Services

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that endpoints use. They are made once per public app."""

    services: Services
    catalog: Catalog
    responses: Responses
    downloads: PullQueue
    batches: Batches


# Makes the endpoint of an operation. Operations with the same path and maker share the endpoint.
Maker = Callable[[Parts], ASGIApp]
# ASGI function with an additional first argument: the part of the API that it serves.
Handler = Callable[[T, Scope, Receive, Send], Awaitable[None]]


class HandlerEndpoint:
    """ASGI app of a handler. A bare function would be called with a `Request` by starlette's router."""

    def __init__(self, handler: Handler[T], part: T) -> None:
        self._app: ASGIApp = partial(handler, part)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def served(endpoint: Callable[[Services], ASGIApp]) -> Maker:
    """Return a maker for an endpoint that needs only the services."""
    return lambda parts: endpoint(parts.services)


def or_upstream(endpoint: Callable[[Services], ASGIApp], dialect: str) -> Maker:
    """Return a maker for an endpoint whose requests may go to an upstream."""
    return lambda parts: UpstreamFallback(endpoint(parts.services), parts.services, dialect)


def on_services(handler: Handler[Services]) -> Maker:
    """Return a maker for the endpoint of a handler that needs only the services."""
    return lambda parts: HandlerEndpoint(handler, parts.services)


def on_catalog(handler: Handler[Catalog]) -> Maker:
    """Return a maker for the endpoint of a handler that reads the catalog of models."""
    return lambda parts: HandlerEndpoint(handler, parts.catalog)


def on_responses(handler: Handler[Responses]) -> Maker:
    """Return a maker for the endpoint of a method of the Responses API."""
    return lambda parts: HandlerEndpoint(handler, parts.responses)


def on_files(handler: Handler[FileEndpoints]) -> Maker:
    """Return a maker for the endpoint of a method of the Files API."""
    return lambda parts: HandlerEndpoint(handler, parts.batches.files)


def on_batches(handler: Handler[OpenAIBatches]) -> Maker:
    """Return a maker for the endpoint of a method of OpenAI's Batch API."""
    return lambda parts: HandlerEndpoint(handler, parts.batches.openai)


def on_message_batches(handler: Handler[MessageBatches]) -> Maker:
    """Return a maker for the endpoint of a method of Anthropic's Message Batches API."""
    return lambda parts: HandlerEndpoint(handler, parts.batches.anthropic)
