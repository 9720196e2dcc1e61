"""Diagnosis of a request's prompt: its comparison with that of an earlier request, which the client names."""

from typing import Final

from gateway.request.recent_requests import RecentRequest
from gateway.request.record import RequestRecord
from gateway.request.runtime import Runtime
from gateway.request.slow_causes import sentence
from gateway.request.why import ask_worker
from protocol.from_worker import Explained, MissCause, MissCode

# Causes that are no difference between the two texts.
_OF_KV: Final = frozenset(
    {
        MissCode.EVICTED,
        MissCode.MEMORY,
        MissCode.TOO_LARGE,
        MissCode.CHECKPOINT,
        MissCode.DISK,
        MissCode.SCORED,
        MissCode.SPARSE,
        MissCode.NOT_STORED,
        MissCode.OFF,
        MissCode.NEW,
    }
)


class Diagnosis:
    """Comparison of a request with the one of an earlier answer of the same key. `run` asks the worker for it.

    `other` is None if no request of the key has such an answer among the newest ones. `explained` is None until the
    worker has answered, and if it cannot.
    """

    def __init__(self, runtime: Runtime, record: RequestRecord, answer_id: str) -> None:
        self._runtime = runtime
        self._record = record
        found = runtime.recent.find(answer_id)
        is_own = found is not None and found.answer_id == answer_id and found.key == record.caller.key
        self.other: RecentRequest | None = found if is_own else None
        self.explained: Explained | None = None
        # Whether there is nothing to wait for any more.
        self.is_settled = self.other is None or self.is_other_model

    @property
    def is_other_model(self) -> bool:
        return self.other is not None and self.other.model != self._record.model

    async def run(self, rid: int, epoch: int) -> None:
        """Compare the prompts, once the request's worker knows both."""
        other = self.other
        if self.is_settled or other is None:
            return
        if other.epoch != epoch or not other.rid:
            self.is_settled = True
            return
        self.explained = await ask_worker(
            self._runtime, other.model, epoch, rid, other.rid, shows_text=True, crosses_salts=False
        )
        self.is_settled = self.explained is not None

    @property
    def difference(self) -> MissCause | None:
        """The first difference between the two texts; None if there is none, or none is known."""
        causes = () if self.explained is None else self.explained.causes
        return next((cause for cause in causes if cause.code not in _OF_KV), None)

    @property
    def is_compared(self) -> bool:
        """Whether the worker has compared both texts."""
        return self.explained is not None and self.other is not None and self.explained.other == self.other.rid

    def words(self, cause: MissCause) -> str:
        """Return what a difference means."""
        assert self.explained is not None
        return f"{sentence(cause, self.explained, lambda _: 'the compared request')}."
