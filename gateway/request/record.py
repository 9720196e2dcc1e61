"""The record of one HTTP request: facts for the access log and traces, its caller, and the headers of its answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from starlette.types import Scope

from gateway.access.caller import NOBODY, Caller
from gateway.config.address import UNKNOWN, Address
from gateway.media.in_flight_bytes import MediaLease
from gateway.request.bodies import BodyLease
from gateway.request.timings import Phases
from gateway.request.trace_context import TraceContext
from protocol.prompts import Media

Header = tuple[bytes, bytes]


class ChunkWriter(Protocol):
    """Writes pieces of a streamed body straight to the connection."""

    @property
    def is_open(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class Dialect(StrEnum):
    """Dialect of a client: the shape of its errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


class ClientLeft(Exception):
    """The client closed the connection before it had its answer."""


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request, for its logs and traces, and what travels with it. Owned by its task."""

    id: str
    method: str
    path: str
    client: Address = UNKNOWN
    dialect: Dialect = Dialect.OPENAI
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    model: str | None = None
    # The peer that serves it, or has served it last; empty is this daemon.
    served_by: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    # The sequences of it, and how each that has ended did.
    rids: tuple[int, ...] = ()
    finishes: list[str] = field(default_factory=list[str])
    phases: Phases = field(default_factory=Phases)
    # Where it stands in a trace of its client.
    trace: TraceContext | None = None
    first_token_s: float | None = None
    outcome: str = ""
    # The ledger has it, whatever comes of it now.
    is_booked: bool = False
    detail: str = ""
    caller: Caller = NOBODY
    # Of the body, with what it has had read again of earlier ones; and the room that they have.
    body_bytes: int = 0
    lease: BodyLease | None = None
    # Images, video and audio without their bytes: how many these are, how many of the body's they were, and their room.
    media: tuple[Media, ...] = ()
    media_bytes: int = 0
    encoded_bytes: int = 0
    media_lease: MediaLease | None = None
    # Headers that the endpoint's answer carries, and its refusal once the endpoint knows them.
    headers: list[Header] = field(default_factory=list[Header])
    # Headers of the middleware, on any answer: known before the endpoint runs, and only when it answers.
    always: list[Header] = field(default_factory=list[Header])
    late_headers: Callable[[], list[Header]] | None = None
    # Direct writes to the client, unless something wants to see what takes them.
    writer: ChunkWriter | None = None

    def detached(self, lease: BodyLease, media_lease: MediaLease) -> "RequestRecord":
        """A record for what outlives the request: it takes over the room of its body and media, for these leases."""
        own = replace(self, phases=Phases(), finishes=[], headers=list(self.headers), writer=None)
        self.lease, self.media_lease = lease, media_lease
        return own


def record_of(scope: Scope) -> RequestRecord:
    """The record that the middleware made."""
    record = scope["mlxd.record"]
    assert isinstance(record, RequestRecord)
    return record
