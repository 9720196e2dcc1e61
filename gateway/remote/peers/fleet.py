"""Fleet: the peers of this daemon, their models, and the places of requests."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import httpx
import msgspec

from gateway.config.settings import Config, ModelConfig, SamplingDefaults, ThinkingDefaults
from gateway.errors import Unavailable
from gateway.link.calls import CallRefused
from gateway.link.link import WorkerLink
from gateway.remote.peers.affinity import Affinity, Prefix
from gateway.remote.peers.peer import POLL_S, PeerNode
from gateway.remote.peers.peer_models import Forms
from gateway.remote.peers.peer_stream import PeerLost, PeerStream
from gateway.remote.peers.placement import CandidatePlace, PlacementChoice
from gateway.task_set import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool.pool import Pool
from gateway.workers.supervisor.state import SHUTTING_DOWN, State, WorkerView
from protocol.codec import Unsendable
from protocol.failures import Code
from protocol.from_worker import Tokenized
from protocol.peering import PeerModel
from protocol.to_worker import Detokenize, Tokenize

log = logging.getLogger(__name__)

D = TypeVar("D", SamplingDefaults, ThinkingDefaults)

DRAIN_POLL_S: Final = 0.02
# Assumed duration of a model's load if none was measured.
UNKNOWN_LOAD_S: Final = 15.0
# One tokenize call is tried at no more than this number of peers.
CALL_ATTEMPTS_MAX: Final = 2
RETRY_AFTER_S: Final = 2.0
# Name of this daemon in lists of places; peers have their own names.
HERE: Final = ""


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """Daemon that can serve a request. `node` and `peer_model` are None for this daemon."""

    place: CandidatePlace
    form: str
    node: PeerNode | None = None
    peer_model: PeerModel | None = None


class Fleet:
    """Owner of the peers, the prefix affinity and the streams at peers. Used on the event loop only.

    `here` returns this daemon's own place for a model.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        link: WorkerLink,
        metrics: Metrics,
        tasks: TaskSet,
        here: Callable[[ModelConfig], CandidatePlace],
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._clock, self._transport = clock, transport
        self.link = link
        self.is_closing = False
        self.nodes: dict[str, PeerNode] = {}
        self.forms = Forms()
        self.pool = pool
        self._metrics = metrics
        self._tasks = tasks
        self._here = here
        self._affinity = Affinity()
        # Epochs of streams at peers are negative, because those of workers are positive.
        self._epochs = itertools.count(-1, -1)
        self._streams = 0
        # Peers that were removed from the configuration, to be closed when no stream runs at them.
        self._removed: list[PeerNode] = []
        self._config = config
        self.apply(config)
        metrics.peers = self._peer_metrics

    # -- start and end -----------------------------------------------------------------------------------------------

    def apply(self, config: Config) -> None:
        """Apply the peers of a configuration. Streams at a removed peer continue."""
        self._config = config
        nodes: dict[str, PeerNode] = {}
        for name, peer in config.peers.items():
            known = self.nodes.pop(name, None)
            if known is not None and known.config == peer:
                nodes[name] = known
                continue
            self._removed += [] if known is None else [known]
            nodes[name] = PeerNode(peer, self.link.boot, self._clock, self._transport)
        self._removed += self.nodes.values()
        self.nodes = nodes

    async def run(self) -> None:
        """Poll the status of each peer once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        polls: dict[PeerNode, asyncio.Task[None]] = {}
        try:
            while True:
                due = loop.time() + POLL_S
                for node in self.nodes.values():
                    if node not in polls or polls[node].done():
                        polls[node] = asyncio.create_task(self._poll(node))
                polls = {node: poll for node, poll in polls.items() if not poll.done() or node in self.nodes.values()}
                await self._close_removed()
                if self.nodes:
                    await self.forms.refresh(self._config.models.values())
                await asyncio.sleep(max(0.0, due - loop.time()))
        finally:
            for poll in polls.values():
                poll.cancel()

    async def drain(self, deadline_s: float) -> None:
        """Let streams at peers finish until the deadline. Sequences lost afterwards are not resumed."""
        end = asyncio.get_running_loop().time() + deadline_s
        while self._streams and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 - tasks of many requests
            await asyncio.sleep(DRAIN_POLL_S)
        self.is_closing = True

    async def close(self) -> None:
        """Close the connections to all peers."""
        self.is_closing = True
        for node in (*self.nodes.values(), *self._removed):
            await node.close()

    async def _poll(self, node: PeerNode) -> None:
        if await node.poll():
            self._affinity.forget(node.name)

    async def _close_removed(self) -> None:
        if self._streams == 0:
            removed, self._removed = self._removed, []
            for node in removed:
                await node.close()

    # -- names -------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> ModelConfig | None:
        """Find a peer's model by `PEER/NAME` or by its name at a peer. No model of this daemon may have that name."""
        pinned, _, rest = name.partition("/")
        node = self.nodes.get(pinned)
        if node is not None and rest and (model := node.model(rest)) is not None:
            return _as_model(f"{pinned}/{model.name}", model, (model.name, *model.aliases))
        entries = list(self._entries(name))
        return None if not entries else _as_model(entries[0][1].name, entries[0][1], entries[0][1].aliases)

    def models(self) -> Iterator[tuple[ModelConfig, WorkerView]]:
        """Yield the peers' models with their state, except those that share a name with a model of this daemon."""
        seen = set(self._config.models)
        for node in self.nodes.values():
            if not node.is_up or node.status is None:
                continue
            for model in node.status.models:
                if model.name not in seen:
                    seen.add(model.name)
                    yield _as_model(model.name, model, model.aliases), _view(model)

    def view(self, name: str) -> WorkerView:
        """Return the state of a model that only peers have; `stopped` if no peer has it now."""
        entries = list(self._served(name))
        return _view(entries[0][1]) if entries else WorkerView(name=name, path="", state=State.STOPPED)

    def _entries(self, name: str) -> Iterator[tuple[PeerNode, PeerModel]]:
        """Yield the available peers that have a model of this name, in the order of the configuration."""
        for node in self.nodes.values():
            if node.is_up and (model := node.model(name)) is not None:
                yield node, model

    def _served(self, name: str) -> Iterator[tuple[PeerNode, PeerModel]]:
        """Yield the available peers that serve a resolved model, whose name may be `PEER/NAME`."""
        pinned, _, rest = name.partition("/")
        node = self.nodes.get(pinned)
        if node is None or not rest or self.serves(name):
            yield from self._entries(name)
        elif node.is_up and (model := node.model(rest)) is not None:
            yield node, model

    def serves(self, name: str) -> bool:
        return name in self._config.models

    # -- places ------------------------------------------------------------------------------------------------------

    def candidates(self, model: ModelConfig, prefixes: list[Prefix], form: str | None) -> list[RouteCandidate]:
        """Return the places of a model, this daemon first. All places have the form of the first one, or `form` if it
        is given.
        """
        candidates: list[RouteCandidate] = []
        if self.serves(model.name):
            candidates.append(RouteCandidate(self._here(model), self.forms.known(model)))
        for node, peer_model in self._served(model.name):
            # An unknown form is empty, and equals no other form.
            is_alike = not candidates or (peer_model.form and peer_model.form == candidates[0].form)
            if is_alike if form is None else peer_model.form == form:
                candidates.append(RouteCandidate(_place(node, peer_model), peer_model.form, node, peer_model))
        if form is not None:
            candidates = [each for each in candidates if form and each.form == form]
        warm = self._affinity.warm(prefixes)
        return [replace(each, place=replace(each.place, warm=warm.get(each.place.name, 0.0))) for each in candidates]

    def has(self, model: ModelConfig, form: str | None) -> bool:
        """Whether some place has the model now. If `form` is given, the place must have that form."""
        return bool(self.candidates(model, [], form))

    def open(
        self, candidate: RouteCandidate, model: str, on_loss: Callable[[PeerLost], None], request: str
    ) -> PeerStream:
        """Open a stream at a peer. Raises `Unavailable` if the peer's key cannot be read."""
        node, peer_model = candidate.node, candidate.peer_model
        assert node is not None, "the place is a peer"
        assert peer_model is not None, "which has the model"
        headers = {"x-request-id": request} if request else {}
        try:
            stream = PeerStream(
                node, model, peer_model, next(self._epochs), self.link, self._tasks, on_loss, self._on_end, headers
            )
        except (OSError, ValueError) as error:
            node.note_failure("key")
            log.warning("peer %s: its key cannot be read: %s", node.name, error)
            raise Unavailable(f"The peer {node.name} cannot be asked.") from None
        self._streams += 1
        return stream

    def note_choice(
        self, model: str, choice: PlacementChoice, reason: str, prefixes: list[Prefix], tokens: float
    ) -> None:
        """Record the place of a request. `model` is the model's name at that place."""
        name = choice.place.name
        self._affinity.note(prefixes, name)
        if name != HERE:
            self.nodes[name].unreported_tokens[model] += max(0, int(tokens - choice.place.warm))
            self._metrics.forwarded[name, reason] += 1

    async def call(self, model: ModelConfig, request: Tokenize | Detokenize) -> Tokenized:
        """Send a tokenize or detokenize call to a peer, and to the next peer if the first is lost.

        Raises `CallRefused`, `WorkerGone`, `Unsendable`, `Unavailable`.
        """
        for candidate in self.candidates(model, [], None)[:CALL_ATTEMPTS_MAX]:
            stream = self.open(candidate, model.name, lambda _: None, "")
            try:
                answer = await self.link.call(stream.epoch, request)
                assert isinstance(answer, Tokenized)
                return answer
            except Unsendable:
                stream.discard()
                raise
            except CallRefused as error:
                if error.failure.code is not Code.WORKER_DIED:
                    raise
        raise no_peer(model.name)

    def start_failover(self, loss: PeerLost, resume: Callable[[PeerLost], Coroutine[Any, Any, None]]) -> None:
        """Start a task that resumes lost sequences."""
        if self.is_closing:
            self.link.fail(loss.sequences, SHUTTING_DOWN)
            return
        model, peer = loss.stream.name, loss.stream.node.name
        log.warning("%d sequences of %s lost their peer %s", len(loss.sequences), model, peer)
        self._metrics.reroutes[peer] += len(loss.sequences)
        self._tasks.start(resume(loss), f"failover of {model}")

    def _on_end(self) -> None:
        self._streams -= 1

    def _peer_metrics(self) -> Iterable[tuple[str, bool, dict[str, int]]]:
        """Return the name, availability and failure counts of each peer."""
        return [(name, node.is_up, dict(node.failures)) for name, node in self.nodes.items()]


def no_peer(model: str) -> Unavailable:
    """Make the error for a model that only peers have while no such peer is available."""
    return Unavailable(f"No peer that serves {model} is available now.", RETRY_AFTER_S, "no_peer_available")


def _place(node: PeerNode, model: PeerModel) -> CandidatePlace:
    load_s = 0.0 if model.state == State.READY else model.load_s or UNKNOWN_LOAD_S
    # The peer's status does not include prompts that were sent since the peer reported it.
    unreported_s = node.unreported_tokens[model.name] / model.prefill_rate if model.prefill_rate else 0.0
    return CandidatePlace(node.name, model.wait_s + unreported_s, model.prefill_rate, load_s)


def _as_model(name: str, model: PeerModel, aliases: tuple[str, ...]) -> ModelConfig:
    """Make the configuration of a peer's model, with the defaults and limits that the peer reports."""
    return ModelConfig(
        name=name,
        path="",
        aliases=tuple(alias for alias in aliases if "*" not in alias),
        context=model.context,
        max_running=max(1, model.slots),
        max_waiting=max(0, model.bound - model.slots),
        sampling=_defaults(model.sampling, SamplingDefaults),
        thinking=_defaults(model.thinking, ThinkingDefaults),
    )


def _defaults(given: dict[str, Any], kind: type[D]) -> D:
    """Decode a peer's defaults. Invalid values are ignored."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        return kind()


def _view(model: PeerModel) -> WorkerView:
    state = State(model.state) if model.state in set(State) else State.STOPPED
    return WorkerView(name=model.name, path="", state=state, ready=model.ready)
