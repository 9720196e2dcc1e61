"""Record of one HTTP request: facts for the access log and traces, the caller, and headers for the answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Protocol

from starlette.types import Scope

from gateway.access.caller import NOBODY, Caller
from gateway.config.address import UNKNOWN, Address
from gateway.control_types import RequestTiming
from gateway.media.in_flight_bytes import MediaLease
from gateway.request.body_memory import BodyLease
from gateway.request.timings import Phases
from gateway.request.trace_context import TraceContext
from protocol.prompts import Media

Header = tuple[bytes, bytes]
# Key of a scope with the caller of a batch's request.
BATCH_CALLER: Final = "mlxd.batch_caller"


class ChunkWriter(Protocol):
    """Writes pieces of a streamed body to the connection."""

    @property
    def is_open(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class PromptComparison(Protocol):
    """Comparison of a request's prompt with an earlier one, once its worker knows both."""

    async def run(self, rid: int, epoch: int) -> None: ...


class Dialect(StrEnum):
    """Dialect of a client, which determines the shape of errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    TYPESAFE = "typesafe"


class ClientLeft(Exception):
    """Raised if the client closes the connection before it gets its answer."""


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request for logs and traces, and its leases. Only the request's task changes the record."""

    id: str
    method: str
    path: str
    client: Address = UNKNOWN
    dialect: Dialect = Dialect.OPENAI
    started: float = field(default_factory=time.perf_counter)
    # Clock of `started` and of the request's deadline.
    clock: Callable[[], float] = time.perf_counter
    status: int = 0
    model: str | None = None
    # Upstream that serves the request or served it last; empty if this daemon does.
    served_by: str = ""
    stream: bool = False
    # Whether the request runs only while its model has no other request. Its times say nothing about the service.
    is_of_batch_class: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    # Ids of the request's sequences, and the finish reasons of the sequences that have ended.
    rids: tuple[int, ...] = ()
    finishes: list[str] = field(default_factory=list[str])
    phases: Phases = field(default_factory=Phases)
    trace: TraceContext | None = None
    first_token_s: float | None = None
    # Id of the answer, in dialects whose answers have one. If the request waited for its model, `waited_for` is the
    # reason for which the model had been unloaded, or the state of its worker.
    answer_id: str = ""
    waited_for: str = ""
    # Whether the generation goes on without the request, with a record of its own.
    is_detached: bool = False
    # Comparison that the client has asked for.
    comparison: PromptComparison | None = None
    # Epoch of the worker that has the request, and how many workers were lost while they had it.
    epoch: int = 0
    resumes: int = 0
    outcome: str = ""
    # Whether the ledger has counted the request.
    is_booked: bool = False
    detail: str = ""
    caller: Caller = NOBODY
    # Whether the request is a chat whose next turn the worker can prefill.
    has_next_turn: bool = False
    # Size of the request's body, including stored items that the request continues, and the lease for that memory.
    body_bytes: int = 0
    lease: BodyLease | None = None
    # `media` lists images, video and audio without their bytes. `media_bytes` is the size of those bytes, and
    # `media_lease` the lease for them. `encoded_bytes` is the encoded size of media and documents in the body, less
    # the size of the texts of the documents.
    media: tuple[Media, ...] = ()
    media_bytes: int = 0
    encoded_bytes: int = 0
    media_lease: MediaLease | None = None
    # Headers for the endpoint's answer. They are also sent with a refusal if the endpoint had set them before.
    headers: list[Header] = field(default_factory=list[Header])
    # Headers that middleware adds to every answer: `always` is known in advance, the others are computed when it is
    # sent.
    always: list[Header] = field(default_factory=list[Header])
    late_headers: Callable[[], list[Header]] | None = None
    # Writes to the connection without ASGI's `send`. None if the stream is captured or the server has no such writer.
    writer: ChunkWriter | None = None

    def timing(self) -> RequestTiming:
        """Return the times until now."""
        return self.phases.timing(self.clock() - self.started, self.first_token_s, self.resumes)

    def detached(self, lease: BodyLease, media_lease: MediaLease) -> "RequestRecord":
        """Return a copy that outlives the request and takes over its leases. The request gets the given
        leases instead.
        """
        own = replace(self, phases=Phases(), finishes=[], headers=list(self.headers), writer=None)
        self.lease, self.media_lease = lease, media_lease
        self.is_detached = True
        return own


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request, which the middleware has stored in its scope."""
    record = scope["mlxd.record"]
    assert isinstance(record, RequestRecord)
    return record
