"""Start of a request's sequences: on a worker that is ready, or on a worker once it has loaded the model.

Kind of a model, found in its worker, settings or files. Requests that need another kind are refused.

Parts of a running gateway that a generation uses.
"""

import asyncio
import math
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.access.ledger import Ledger
from gateway.config.settings import Config, ModelConfig
from gateway.errors import BadRequest, Cancelled, Unavailable, from_failure, from_unsendable
from gateway.link.collector import Collector
from gateway.link.link import LATE, WorkerLink
from gateway.link.transport import WorkerGone
from gateway.media.modalities import check
from gateway.model_files.metadata import kind_of_files
from gateway.request.admission import Admission
from gateway.request.in_flight import RecentRequests, Requests
from gateway.request.next_turns import NextTurns
from gateway.request.record import RequestRecord
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool import Pool
from gateway.workers.supervisor.state import ModelUnavailable, State, WorkerView
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.checkpoint import AUDIO, EMBED, RERANK, TEXT
from protocol.codec import Unsendable
from protocol.failures import Code, Failure
from protocol.from_worker import Ready
from protocol.to_worker import Generate

_ABILITIES: Final = {
    TEXT: "generates text: use POST /v1/chat/completions",
    EMBED: "makes embeddings: use POST /v1/embeddings",
    AUDIO: "hears or speaks: use POST /v1/audio/transcriptions, /v1/audio/translations or /v1/audio/speech",
    RERANK: "scores pairs of texts: use POST /v1/rerank or POST /v1/score",
}


def kind_of_model(model: ModelConfig, ready: Ready | None) -> str:
    """Return the kind of a model as its worker reports it or, before it is loaded, as its settings or files show it.
    Empty if the files cannot be read.
    """
    if ready is not None:
        return ready.kind or TEXT
    return kind_of_files(model.path) if model.kind == "auto" else model.kind


def check_kind(model: ModelConfig, ready: Ready | None, needed: str) -> None:
    """Raises `BadRequest` if the request needs another kind of model."""
    kind = kind_of_model(model, ready)
    if kind and kind != needed:
        message = f"The model '{model.name}' {_ABILITIES[kind]}."
        raise BadRequest(message, "model", "unsupported_model_kind")


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


QUEUE_RETRY_AFTER_S: Final = 5.0
QUEUE_RETRY_AFTER_MAX_S: Final = 300.0
LOST: Final = Failure(Code.WORKER_DIED, "The model's worker was lost. Try again.")


def not_ready(pool: Pool, model: ModelConfig, queue_s: float) -> Unavailable:
    """Return the error for a model that was not ready in time. Its Retry-After follows from earlier load times."""
    left_s = min(QUEUE_RETRY_AFTER_MAX_S, max(QUEUE_RETRY_AFTER_S, pool.load_left_s(model.name)))
    return Unavailable(f"The model was not ready within {queue_s:g} seconds.", left_s, "queue_timeout")


class Opener:
    """Gives the sequences of one request to a worker. The request's generation owns it."""

    def __init__(
        self,
        runtime: Runtime,
        model: ModelConfig,
        generates: list[Generate],
        record: RequestRecord,
        *,
        kind: str,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._generates = generates
        self._record = record
        self._numbers = runtime.metrics.model(model.name)
        self._kind = kind
        # The worker is looked up now, because a reload may remove the model from the pool. None if one just has.
        self._worker = runtime.pool.find(model.name)
        # The deadline counts from the request's arrival, so it includes the time to load the model.
        limit_ms = generates[0].deadline_ms
        self._deadline = record.started + limit_ms / 1000 if limit_ms else math.inf
        self._timeout: asyncio.Timeout | None = None
        self._interruption: Cancelled | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether `open` waits for the model."""
        return self._timeout is not None

    @property
    def is_late(self) -> bool:
        """Whether the request's deadline has passed."""
        return self._record.clock() >= self._deadline

    @property
    def is_loading(self) -> bool:
        """Whether the model's worker is being started."""
        return self._worker is not None and self._worker.state in (State.STARTING, State.LOADING)

    def interrupt(self, reason: Cancelled | None) -> bool:
        """End the wait in `open`. `open` then raises `reason`, if it is not None.

        Returns False if `open` is not waiting.
        """
        self._interruption = self._interruption or reason
        if self._timeout is None:
            return False
        self._timeout.reschedule(0.0)
        return True

    def open_now(self) -> Collector | None:
        """Start the request on the model's worker.

        Returns None if it is not ready; `open` then waits for it. Raises `ApiError`.
        """
        return self._submit(self._worker) if self._worker is not None and self._worker.is_ready else None

    async def open(self) -> Collector:
        """Wait until the model is ready, and start the request. Raises `ApiError`."""
        self._check_before_load()
        phases, numbers = self._record.phases, self._numbers
        phases.loading_from = self._elapsed()
        if self._worker is not None:
            self._record.waited_for = numbers.newest_eviction or str(self._worker.state)
        numbers.opening += len(self._generates)
        try:
            return await self._wait_and_submit()
        finally:
            numbers.opening -= len(self._generates)
            phases.load = (phases.sent_at or self._elapsed()) - phases.loading_from

    def _check_before_load(self) -> None:
        """Raises `BadRequest` if the request needs another kind of model. Checked first, so that no model is loaded in
        vain.
        """
        if self._worker is not None and self._worker.ready is None:
            check_kind(self._model, None, self._kind)

    async def _wait_and_submit(self) -> Collector:
        queue_s = self._runtime.config.server.queue_timeout_s
        limit_s = min(queue_s or math.inf, self._deadline - self._record.clock())
        try:
            async with asyncio.timeout(limit_s if limit_s < math.inf else None) as self._timeout:
                losses = 0
                while losses < 2:
                    worker = await self._runtime.pool.ensure_ready(self._model.name)
                    # Only the loss of a ready worker counts. A worker that gave its memory to another model meanwhile
                    # is waited for.
                    losses += worker.is_ready
                    if (collector := self._submit(worker)) is not None:
                        return collector
            raise from_failure(LOST)
        except ModelUnavailable as error:
            is_operator = self._record.caller.is_admin
            raise from_failure(error.failure, error.retry_after_s, is_operator=is_operator) from None
        except TimeoutError:
            if self._interruption is not None:
                raise self._interruption from None
            if self.is_late:
                raise from_failure(LATE) from None
            raise not_ready(self._runtime.pool, self._model, queue_s) from None
        finally:
            self._timeout = None

    def _submit(self, worker: WorkerHandle) -> Collector | None:
        """Send the sequences to a worker. Returns None if the worker is gone."""
        self._check(worker)
        try:
            collector = self._runtime.link.submit(worker, self._timed())
        except WorkerGone:
            return None
        except Unsendable as error:
            self._runtime.metrics.rejected(self._model.name, "unsendable")
            raise from_unsendable(error) from None
        self._record.rids = collector.rids
        self._record.phases.sent_at = self._elapsed()
        return collector

    def _check(self, worker: WorkerHandle) -> None:
        """Raises `BadRequest` if the loaded model cannot serve this request."""
        if not worker.is_ready:
            return
        check_kind(self._model, worker.ready, self._kind)
        if self._record.media:
            check(self._model.name, self._model.path, self._runtime.view(self._model).ready, self._record.media)

    def _timed(self) -> list[Generate]:
        """Return the sequences with the time that is left until their deadline."""
        if self._deadline == math.inf:
            return self._generates
        left_ms = max(1, int((self._deadline - self._record.clock()) * 1000))
        return [msgspec.structs.replace(generate, deadline_ms=left_ms) for generate in self._generates]

    def _elapsed(self) -> float:
        return self._record.clock() - self._record.started
