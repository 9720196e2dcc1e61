"""Route of one request: its first place, and the failover of its sequences when a place is lost."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast

import msgspec

from gateway.config.settings import ModelConfig
from gateway.link.sequence import PARKED, Sequence
from gateway.link.wire import WorkerGone
from gateway.remote.peers.affinity import Prefix, prefixes_of
from gateway.remote.peers.fleet import HERE, Fleet, no_peer
from gateway.remote.peers.peer_stream import PeerLost, PeerStream
from gateway.remote.peers.placement import choose
from gateway.workers.supervisor.state import ModelUnavailable
from protocol.codec import BYTES_PER_TOKEN, prompt_bytes
from protocol.prompts import Prompt
from protocol.to_worker import Generate

log = logging.getLogger(__name__)

# Lost sequences wait at most FAILOVER_TIMEOUT_S for another place. One is sought every FAILOVER_POLL_S.
FAILOVER_TIMEOUT_S: Final = 30.0
FAILOVER_POLL_S: Final = 0.2
# Maximum number of moves of one sequence.
MOVES_MAX: Final = 20


@dataclass(slots=True)
class RequestRoute:
    """Places of one request. Its generation owns the route; a task of the fleet moves lost sequences.

    `served_by` is the peer that serves the request, or empty. Once tokens were generated or scored, all further places
    must have the same `form`, because others would generate other tokens.
    """

    fleet: Fleet
    model: ModelConfig
    prefixes: list[Prefix]
    tokens: float
    request: str
    on_move: Callable[[str], None]
    served_by: str = HERE
    form: str = ""
    # True if this daemon could not load the model.
    is_refused_here: bool = False
    _prompt_tokens: dict[int, int] = field(default_factory=dict[int, int])
    # Maps request ids to the index of the sequence's open tool call.
    _calls: dict[int, int] = field(default_factory=dict[int, int])

    def begin(self) -> PeerStream | None:
        """Choose the first place: a stream at a peer, or None for this daemon. Raises `Unavailable`."""
        stream = self._next("", self.form or None)
        if stream is not None or self.served_by == HERE:
            return stream
        raise no_peer(self.model.name)

    def begin_at_peer(self) -> PeerStream | None:
        """Choose a peer, because this daemon cannot serve the model. None if no peer has the model."""
        self.is_refused_here = True
        return self._next("unavailable")

    async def resume_lost(self, loss: PeerLost) -> None:
        """Resume lost sequences at a peer or on this daemon. Waits for a place; after a time-out the sequences fail."""
        loop = asyncio.get_running_loop()
        end, link = loop.time() + FAILOVER_TIMEOUT_S, self.fleet.link
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
            # Sequences that are no longer parked run on a local worker. If it is lost, its own failover resumes them.
            left = [sequence for sequence in left if sequence.epoch == PARKED]
            for sequence in left:
                sequence.collector.note_activity()
            await asyncio.sleep(FAILOVER_POLL_S)

    async def _move(self, left: list[Sequence]) -> bool:
        """Resume the sequences at another place. Returns False if there is no place now."""
        needs_form = any(sequence.token_ids or sequence.prompt_scored or sequence.echo_scored for sequence in left)
        stream = self._next("failover", self.form if needs_form else None)
        link = self.fleet.link
        if stream is not None:
            for sequence in left:
                link.resume(stream.epoch, sequence)
            if not any(sequence.epoch == stream.epoch for sequence in left):
                # No sequence is left to move: their deadline has passed, or they are too large.
                stream.discard()
            return True
        if self.served_by != HERE:
            return False
        try:
            async with asyncio.timeout(FAILOVER_TIMEOUT_S):
                worker = await self.fleet.pool.ensure_ready(self.model.name)
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
        """Move to the place that is best now. Returns a stream at a peer, or None. `served_by` becomes `-` if there is
        no place.
        """
        candidates = self.fleet.candidates(self.model, self.prefixes, form)
        if self.is_refused_here:
            candidates = [each for each in candidates if each.node is not None]
        if not candidates:
            self._settle("-", self.form)
            return None
        choice = choose([each.place for each in candidates], self.tokens)
        chosen = next(each for each in candidates if each.place is choice.place)
        name = self.model.name if chosen.peer_model is None else chosen.peer_model.name
        self.fleet.note_choice(name, choice, reason or choice.reason, self.prefixes, self.tokens)
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
        self.fleet.start_failover(loss, self.resume_lost)


def make_route(
    fleet: Fleet,
    model: ModelConfig,
    generates: list[Generate],
    request: str,
    on_move: Callable[[str], None],
    form: str = "",
) -> RequestRoute | None:
    """Make the route of a request; None if only this daemon can serve it. `form` restricts its first place.

    A request that resumes an earlier response stays on this daemon, because only this daemon certainly has the form
    that generated it.
    """
    if not fleet.nodes or (fleet.serves(model.name) and any(each.resume for each in generates)):
        return None
    tokens = sum(prompt_bytes(each) for each in generates[:1]) / BYTES_PER_TOKEN
    # The prompt is already encoded, like that of every message that is ready to be sent.
    prompt = cast("Prompt | msgspec.Raw", generates[0].prompt)
    scope = model.name, generates[0].cache_salt
    prefixes = prefixes_of(prompt, *scope) if isinstance(prompt, msgspec.Raw) else []
    return RequestRoute(fleet, model, prefixes, tokens, request, on_move, form=form)
