"""Explanation of one request that has ended: its facts, and what its model's worker knows of its prompt."""

import asyncio
import logging
from typing import Final

from gateway.control_types import RequestWhy, SlowCause
from gateway.link.calls import CallRefused
from gateway.link.wire import WorkerGone
from gateway.request.recent_requests import RecentRequest
from gateway.request.runtime import Runtime
from gateway.request.slow_causes import reloaded, slow_causes
from protocol.codec import Unsendable
from protocol.from_worker import Explained
from protocol.to_worker import Explain

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 5.0
UNKNOWN: Final = SlowCause("unknown", 0.0, "Its worker has ended or has forgotten its prompt, so misses have no cause.")


async def ask_worker(
    runtime: Runtime, model: str, epoch: int, rid: int, other: int = 0, *, shows_text: bool, crosses_salts: bool
) -> Explained | None:
    """Ask a worker why tokens of a request's prompt were not cached. Returns None if it has ended or does not know."""
    worker = runtime.pool.find(model)
    if worker is None or not rid or worker.epoch != epoch or not worker.is_ready:
        return None
    call = Explain(runtime.link.next_rid(), rid, other, shows_text, crosses_salts)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answer = await runtime.link.call(epoch, call)
    except (CallRefused, WorkerGone, Unsendable, TimeoutError) as error:
        log.debug("no explanation of request %d: %s", rid, error)
        return None
    return answer if isinstance(answer, Explained) and (answer.prompt or answer.causes) else None


async def explain(runtime: Runtime, request: RecentRequest, *, shows_text: bool) -> RequestWhy:
    """Return why a request took its time. Texts are shown only to the owner of its key, else they are hashes."""
    explained = await ask_worker(
        runtime, request.model, request.epoch, request.rid, shows_text=shows_text, crosses_salts=True
    )
    before = runtime.recent.before(request)
    if explained is not None and before is not None and before.epoch != request.epoch:
        explained = reloaded(request, before, explained)

    def name_of(rid: int) -> str:
        other = runtime.recent.of_rid(rid)
        return f"request {other.id}" if other is not None else "another request"

    other = runtime.recent.of_rid(explained.other) if explained is not None else None
    causes = slow_causes(request.timing, explained, name_of, request.waited_for, request.served_by)
    if explained is None and request.rid and not request.served_by:
        causes.append(UNKNOWN)
    return RequestWhy(
        id=request.id,
        answer_id=request.answer_id,
        model=request.model,
        key=request.key,
        path=request.path,
        at=request.at,
        outcome=request.outcome,
        timing=request.timing,
        causes=causes,
        compared=other.id if other is not None else "",
    )
