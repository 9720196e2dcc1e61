"""Load and unload of a model by Ollama requests without a prompt."""

import asyncio
from contextlib import ExitStack
from typing import Final

import msgspec
from starlette.types import Receive, Send

from gateway.api.ollama.admin_only import order
from gateway.api.ollama.request import GenerationFields
from gateway.api.ollama.response import OllamaLine
from gateway.config.settings import ModelConfig
from gateway.errors import ModelNotFound, Unavailable, from_failure
from gateway.http.exchange import JSON, send_body
from gateway.http.sse import JSON_LINES, cut_off
from gateway.request.opener import retry_after_s
from gateway.request.record import ClientLeft, RequestRecord
from gateway.services import Services
from gateway.workers.supervisor.state import ModelUnavailable

LOADED: Final = "load"
UNLOADED: Final = "unload"


class LoadOrder:
    """Load or unload of a model. Any caller may load it, as any request does; unloading affects all callers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def run(self, record: RequestRecord, model: ModelConfig, receive: Receive, *, is_last: bool) -> str:
        """Load the model, or unload it if `is_last`; return Ollama's `done_reason`.

        Raises `ApiError` and `ClientLeft`.
        """
        if model.name not in self._services.config.models:
            # A peer loads its models with their first answers; only its own operator may unload them.
            if is_last:
                usable = record.caller.usable(self._services.config.models.values())
                raise ModelNotFound(model.name, [each.name for each in usable], "Models that are loaded here")
            return LOADED
        reason = ""
        async with cut_off(record, receive):
            reason = await (self._unload(record, model) if is_last else self._load(record, model))
        if not reason:
            raise ClientLeft
        return reason

    async def tell(self, record: RequestRecord, line: OllamaLine, request: GenerationFields, send: Send) -> None:
        """Answer with one line, which is also a whole stream."""
        body = msgspec.json.encode(line)
        kind = JSON_LINES if request.is_stream else JSON
        await send_body(send, 200, body + b"\n" if request.is_stream else body, record.headers, kind)

    async def _load(self, record: RequestRecord, model: ModelConfig) -> str:
        services, caller = self._services, record.caller
        share = caller.queue_share or services.config.server.queue_share
        queue_s = services.config.server.queue_timeout_s
        with ExitStack() as held:
            held.enter_context(services.admission.lease(model, 1, caller.key, share))
            held.enter_context(services.pool.lease(model.name))
            try:
                async with asyncio.timeout(queue_s or None):
                    await services.pool.ensure_ready(model.name)
            except ModelUnavailable as error:
                raise from_failure(error.failure, error.retry_after_s, is_operator=caller.is_admin) from None
            except TimeoutError:
                message = f"The model was not ready within {queue_s:g} seconds."
                raise Unavailable(message, retry_after_s(services.pool, model), "queue_timeout") from None
        return LOADED

    async def _unload(self, record: RequestRecord, model: ModelConfig) -> str:
        order(self._services, record, "model.unload", model.name, "Unloading a model")
        await self._services.pool.unload(model.name)
        return UNLOADED
