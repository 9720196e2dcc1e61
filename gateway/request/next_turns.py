"""Prefill of the next turns of chats: after an answer, its worker puts the conversation as its template will render it
into the prefix cache.

As a probe, this counts in no admission queue, key or metric of requests, and keeps no model loaded. The worker computes
it only while it has no request of a client.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

from gateway.link.link import WorkerLink
from gateway.link.transport import WorkerGone
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool import Pool
from gateway.workers.supervisor.state import State
from protocol.codec import Unsendable
from protocol.to_worker import BATCH_PRIORITY, ChatPrompt, Generate, NextTurnPrompt, Sampling

# Number of newest answers of a model whose next turns may wait for their prefill.
_MAX_WAITING: Final = 8
# A prefill that clients have kept waiting for longer is given up: most next turns have come by then.
_DEADLINE_MS: Final = 60_000


class NextTurns:
    """Prefills of next turns that may still run, by model. No task waits for their ends."""

    def __init__(self, live: LiveConfig, pool: Pool, link: WorkerLink, metrics: Metrics) -> None:
        self._live = live
        self._pool = pool
        self._link = link
        self._metrics = metrics
        self._rids: defaultdict[str, deque[int]] = defaultdict(deque)

    def expect(self, name: str, answered: Generate, epoch: int) -> None:
        """Have the next turn of a chat prefilled, which the worker of this epoch has answered."""
        model, worker = self._live.config.models.get(name), self._pool.find(name)
        if model is None or not model.prefill_next_turn:
            return
        if worker is None or worker.epoch != epoch or worker.state is not State.READY:
            return
        rid = self._link.next_rid()
        request = Generate(
            rid,
            NextTurnPrompt(answered.rid, answered.sampling.seed),
            Sampling(),
            max_tokens=0,
            priority=BATCH_PRIORITY,
            deadline_ms=_DEADLINE_MS,
            cache_salt=answered.cache_salt,
            adapter=answered.adapter,
        )
        try:
            self._link.submit(worker, [request])
        except (WorkerGone, Unsendable):
            return
        self._metrics.model(name).next_turns += 1
        rids = self._rids[name]
        rids.append(rid)
        if len(rids) > _MAX_WAITING:
            self._link.abort([rids.popleft()], "newer turns")

    def on_state(self, name: str, state: State) -> None:
        """Give up the prefills of a worker that leaves its ready state: neither an unload nor a successor waits."""
        if state is not State.READY:
            self._link.abort(self._rids.pop(name, ()), "next turn")

    def stop(self) -> None:
        """Give up all prefills."""
        for name in list(self._rids):
            self._link.abort(self._rids.pop(name), "next turn")


def has_next_turn(requests: Sequence[Generate]) -> bool:
    """Whether these sequences are a chat of text as a person or an agent continues it: neither cut to fit, nor asked
    for data alone. Call it before their prompts are encoded."""
    if len(requests) != 1:
        return False
    request, prompt = requests[0], requests[0].prompt
    is_plain = isinstance(prompt, ChatPrompt) and not (prompt.media or prompt.continue_final or prompt.must_call)
    return is_plain and not request.questions and request.constraint is None and not request.truncate
