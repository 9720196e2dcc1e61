"""Registry of the requests that are being served.

Ring of the newest requests that have ended, to explain why one of them was slow. It has no prompts.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.control_types import RequestTiming, RequestView
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


# Clients' ids never contain this character.
DUPLICATE_MARK: Final = "~"


class InFlightRequest(Protocol):
    """Request as the registry lists it: a `Generation` of this daemon, or a request that an upstream serves."""

    record: RequestRecord

    @property
    def state(self) -> str: ...
    @property
    def sequences(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def prefilled_tokens(self) -> int: ...
    @property
    def prefill_left_s(self) -> float | None: ...
    @property
    def generated_tokens(self) -> int: ...

    def cancel(self) -> None: ...


class Requests:
    """Running requests by id. If a request's id is already in use, it is listed as `ID~2`, `ID~3`, and so on."""

    def __init__(self) -> None:
        self._served: dict[str, InFlightRequest] = {}

    @contextmanager
    def hold(self, served: InFlightRequest) -> Generator[None, None, None]:
        """Keep a request in the registry within this context."""
        name = stem = served.record.id
        number = 1
        while name in self._served:
            number += 1
            name = f"{stem}{DUPLICATE_MARK}{number}"
        self._served[name] = served
        try:
            yield
        finally:
            del self._served[name]

    def of(self, model: str) -> Iterator[InFlightRequest]:
        """Return the requests for one model."""
        return (served for served in self._served.values() if served.record.model == model)

    def views(self) -> list[RequestView]:
        """Return all requests, the oldest first."""
        return [_view(name, served) for name, served in self._served.items()]

    def view(self, name: str) -> RequestView | None:
        served = self._served.get(name)
        return None if served is None else _view(name, served)

    def cancel(self, name: str) -> bool:
        """Cancel a request; its client gets an error. Returns False if no request has this id."""
        served = self._served.get(name)
        if served is None:
            return False
        served.cancel()
        return True


def _view(name: str, served: InFlightRequest) -> RequestView:
    record = served.record
    now = record.clock()
    first = record.first_token_s
    decoding_s = 0.0 if first is None else now - record.started - first
    left_s = served.prefill_left_s if first is None else None
    return RequestView(
        id=name,
        model=record.model or "",
        key=record.caller.key,
        path=record.path,
        stream=record.stream,
        state=served.state,
        age_s=round(now - record.started, 3),
        sequences=served.sequences,
        prompt_tokens=served.prompt_tokens,
        cached_tokens=served.cached_tokens,
        generated_tokens=served.generated_tokens,
        tokens_per_s=round(served.generated_tokens / decoding_s, 1) if decoding_s > 0 else 0.0,
        ttft_s=None if first is None else round(first, 3),
        prefilled_tokens=served.prefilled_tokens,
        prefill_left_s=None if left_s is None else round(left_s, 1),
    )
