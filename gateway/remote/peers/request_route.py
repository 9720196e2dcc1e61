"""One request's way over daemons: where it is sent first, and where its sequences go on when that place is lost."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.config.settings import ModelConfig
from gateway.errors import Unavailable
from gateway.link.link import WorkerLink
from gateway.link.sequence import PARKED, Sequence
from gateway.link.transport import WorkerGone
from gateway.remote.peers.affinity import Prefix
from gateway.remote.peers.peer import PeerNode
from gateway.remote.peers.peer_stream import PeerLost, PeerStream
from gateway.remote.peers.placement import CandidatePlace, PlacementChoice, choose
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import ModelUnavailable
from protocol.peering import PeerModel

log = logging.getLogger(__name__)

# How long what was lost waits for a place to come back, and how often one is looked for.
RETURN_S: Final = 30.0
LOOK_S: Final = 0.2
RETRY_AFTER_S: Final = 2.0
# A sequence changes its place this often at most.
MOVES_MAX: Final = 20
HERE: Final = ""


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """A place, and the peer with its model; None for this daemon."""

    place: CandidatePlace
    form: str
    node: PeerNode | None = None
    there: PeerModel | None = None


class RouteFleet(Protocol):
    """Port of a journey to the fleet, which knows the places."""

    link: WorkerLink
    is_closing: bool

    def candidates(self, model: ModelConfig, prefixes: list[Prefix], form: str | None) -> list[RouteCandidate]: ...
    def open(
        self, candidate: RouteCandidate, model: str, on_loss: "Callable[[PeerLost], None]", request: str
    ) -> PeerStream: ...
    def chosen(
        self, model: str, choice: PlacementChoice, reason: str, prefixes: list[Prefix], tokens: float
    ) -> None: ...
    async def ensure_here(self, model: str) -> WorkerHandle: ...
    def start(self, journey: "RequestRoute", loss: PeerLost) -> None: ...


@dataclass(slots=True)
class RequestRoute:
    """The places of one request. Owned by its generation; what was lost is moved on by a task of the fleet.

    `served_by` is the peer that serves it, or empty. A place where tokens were generated or scored fixes `form`: only
    where the model has the same form can the next token be the same.
    """

    fleet: RouteFleet
    model: ModelConfig
    prefixes: list[Prefix]
    tokens: float
    request: str
    on_move: Callable[[str], None]
    served_by: str = HERE
    form: str = ""
    # This daemon could not load the model.
    is_refused_here: bool = False
    _prompt_tokens: dict[int, int] = field(default_factory=dict[int, int])
    # The tool calls that its sequences are in.
    _calls: dict[int, int] = field(default_factory=dict[int, int])

    def begin(self) -> PeerStream | None:
        """Choose the first place: a stream at a peer, or None for here. Raises `Unavailable` where there is none."""
        stream = self._next("", self.form or None)
        if stream is not None or self.served_by == HERE:
            return stream
        raise no_peer(self.model.name)

    def begin_elsewhere(self) -> PeerStream | None:
        """A stream at a peer, because the model cannot be served here; None where no peer has it."""
        self.is_refused_here = True
        return self._next("unavailable")

    async def go_on(self, loss: PeerLost) -> None:
        """Let the sequences go on at a peer, here, or where one comes back in time; else they end with the failure."""
        loop = asyncio.get_running_loop()
        end, link = loop.time() + RETURN_S, self.fleet.link
        left = loss.sequences
        self._prompt_tokens |= loss.stream.prompt_tokens
        self._calls |= loss.stream.claims.calls
        exhausted = [sequence for sequence in left if sequence.resumes >= MOVES_MAX]
        link.fail(exhausted, loss.failure)
        while left := [sequence for sequence in left if not sequence.is_over]:
            if self.fleet.is_closing or loop.time() >= end:
                link.fail(left, loss.failure)
                return
            if await self._move(left):
                return
            # The others were sent before their worker was lost, which minds them.
            left = [sequence for sequence in left if sequence.epoch == PARKED]
            for sequence in left:
                sequence.collector.note_activity()
            await asyncio.sleep(LOOK_S)

    async def _move(self, left: list[Sequence]) -> bool:
        """Give the sequences to another place. False where there is none now."""
        needs_form = any(sequence.token_ids or sequence.prompt_scored or sequence.echo_scored for sequence in left)
        stream = self._next("failover", self.form if needs_form else None)
        link = self.fleet.link
        if stream is not None:
            for sequence in left:
                link.resume(stream.epoch, sequence)
            if not any(sequence.epoch == stream.epoch for sequence in left):
                # Their deadline has passed, or they are too large.
                stream.discard()
            return True
        if self.served_by != HERE:
            return False
        try:
            async with asyncio.timeout(RETURN_S):
                worker = await self.fleet.ensure_here(self.model.name)
            for sequence in left:
                if not sequence.is_over:
                    link.resume(worker.epoch, sequence)
        except (ModelUnavailable, TimeoutError) as error:
            log.warning("model %s cannot take over from a peer: %s", self.model.name, error or "not loaded in time")
            self.is_refused_here = True
            return False
        except WorkerGone:
            return False
        return True

    def _next(self, reason: str, form: str | None = None) -> PeerStream | None:
        """The best place now; `served_by` is `-` where there is none."""
        candidates = self.fleet.candidates(self.model, self.prefixes, form)
        if self.is_refused_here:
            candidates = [each for each in candidates if each.node is not None]
        if not candidates:
            self._settle("-", self.form)
            return None
        choice = choose([each.place for each in candidates], self.tokens)
        chosen = next(each for each in candidates if each.place is choice.place)
        there = self.model.name if chosen.there is None else chosen.there.name
        self.fleet.chosen(there, choice, reason or choice.reason, self.prefixes, self.tokens)
        self._settle(choice.place.name, chosen.form)
        if chosen.node is None:
            return None
        stream = self.fleet.open(chosen, self.model.name, self._on_loss, self.request)
        stream.prompt_tokens |= self._prompt_tokens
        stream.claims.calls |= self._calls
        return stream

    def _settle(self, place: str, form: str) -> None:
        self.served_by, self.form = place, form
        self.on_move("" if place == "-" else place)

    def _on_loss(self, loss: PeerLost) -> None:
        self.fleet.start(self, loss)


def no_peer(model: str) -> Unavailable:
    """The error for a model that only peers have, while none of them can be asked."""
    return Unavailable(f"No peer that serves {model} is available now.", RETRY_AFTER_S, "no_peer_available")
