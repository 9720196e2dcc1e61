"""Ring of the newest requests that have ended, to explain why one of them was slow. It has no prompts."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from gateway.control_types import RequestTiming
from gateway.request.record import RequestRecord

MAX_REQUESTS: Final = 1024


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """Facts about a request that has ended. `at` is the Unix time of its arrival.

    `rid` is that of its first sequence, 0 if no worker got one, and `epoch` that of its newest worker. `waited_for`
    is that of its record, `served_by` the upstream that served it; both may be empty.
    """

    id: str
    answer_id: str
    model: str
    key: str | None
    path: str
    at: float
    outcome: str
    waited_for: str
    served_by: str
    rid: int
    epoch: int
    timing: RequestTiming


class RecentRequests:
    """The newest requests that have ended, the oldest first."""

    def __init__(self, most: int = MAX_REQUESTS) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=most)

    def add(self, record: RequestRecord) -> None:
        """Add a request that has just ended."""
        timing = record.timing()
        self._requests.append(
            RecentRequest(
                id=record.id,
                answer_id=record.answer_id,
                model=record.model or "",
                key=record.caller.key,
                path=record.path,
                at=time.time() - timing.total_ms / 1000,
                outcome=record.outcome or next(iter(record.finishes), ""),
                waited_for=record.waited_for,
                served_by=record.served_by,
                rid=record.rids[0] if record.rids else 0,
                epoch=record.epoch,
                timing=timing,
            )
        )

    def find(self, name: str) -> RecentRequest | None:
        """Return the newest request with this id, or whose answer has this id."""
        return next((each for each in reversed(self._requests) if name and name in (each.id, each.answer_id)), None)

    def of_rid(self, rid: int) -> RecentRequest | None:
        """Return the request of this sequence."""
        return next((each for each in reversed(self._requests) if rid and each.rid == rid), None)

    def before(self, request: RecentRequest) -> RecentRequest | None:
        """Return the newest earlier request of the same key for the same model."""
        earlier = (each for each in reversed(self._requests) if each.at < request.at)
        return next((each for each in earlier if (each.key, each.model) == (request.key, request.model)), None)
