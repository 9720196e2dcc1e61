"""Loads and unloads a model for Ollama requests without a prompt, and authorizes administrative requests.

Unloading and downloading a model need an admin key. While there are no keys, every program on this machine may use the
models, but none may administer them.
"""

import asyncio
from contextlib import ExitStack
from typing import Final

from starlette.types import Receive

from gateway.access.audit_log import Action, AuditActor, entry
from gateway.config.settings import ModelConfig
from gateway.errors import Forbidden, Unavailable, from_failure
from gateway.http.sse import cut_off
from gateway.request.opener import retry_after_s
from gateway.request.record import ClientLeft, RequestRecord
from gateway.services import Services
from gateway.workers.supervisor.state import ModelUnavailable

LOADED: Final = "load"
UNLOADED: Final = "unload"


async def load_or_unload(
    services: Services, record: RequestRecord, model: ModelConfig, receive: Receive, *, is_last: bool
) -> str:
    """Load the model, or unload it if `is_last`. Returns Ollama's `done_reason`.

    Any caller may load the model, as any request does. Unloading affects all callers. Raises `ApiError` and
    `ClientLeft`.
    """
    try:
        async with cut_off(record, receive):
            if is_last:
                authorize(services, record, "model.unload", model.name, "Unloading a model")
                await services.pool.unload(model.name)
                return UNLOADED
            await _load(services, record, model)
            return LOADED
    except ModelUnavailable as error:
        raise from_failure(error.failure, error.retry_after_s, is_operator=record.caller.is_admin) from None
    raise ClientLeft


async def _load(services: Services, record: RequestRecord, model: ModelConfig) -> None:
    caller, queue_s = record.caller, services.config.server.queue_timeout_s
    share = caller.queue_share
    with ExitStack() as held:
        held.enter_context(services.admission.lease(model, 1, caller.key, share))
        held.enter_context(services.pool.lease(model.name))
        try:
            async with asyncio.timeout(queue_s or None):
                await services.pool.ensure_ready(model.name)
        except TimeoutError:
            message = f"The model was not ready within {queue_s:g} seconds."
            raise Unavailable(message, retry_after_s(services.pool, model), "queue_timeout") from None


def authorize(services: Services, record: RequestRecord, action: Action, target: str, what: str) -> None:
    """Check that the caller may give an administrative command, and record it in the audit log. Raises `Forbidden`."""
    caller = record.caller
    if caller.key is None or not caller.is_admin:
        raise Forbidden(f"{what} needs an admin key: mlxctl keys create NAME --admin")
    line = entry(action, target, client=str(record.client), actor=AuditActor(), facts={"key": caller.key})
    services.audit.record(line)
