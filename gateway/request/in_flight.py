"""Registry of the requests that are being served."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from gateway.control_types import RequestView
from gateway.request.record import RequestRecord

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
