"""The peers of this daemon: their models behind its names, and the places of its requests."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar, cast

import msgspec

from gateway.config.settings import Config, ModelConfig, SamplingDefaults, ThinkingDefaults
from gateway.errors import Unavailable
from gateway.link.calls import CallRefused
from gateway.link.link import WorkerLink
from gateway.remote.peers.affinity import Affinity, Prefix, prefixes_of
from gateway.remote.peers.peer import POLL_S, PeerNode
from gateway.remote.peers.peer_models import Forms
from gateway.remote.peers.peer_stream import PeerLost, PeerStream
from gateway.remote.peers.placement import CandidatePlace, PlacementChoice
from gateway.remote.peers.request_route import HERE, RequestRoute, RouteCandidate, no_peer
from gateway.task_set import TaskSet
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool.pool import Pool
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import SHUTTING_DOWN, State, WorkerView
from protocol.codec import BYTES_PER_TOKEN, Unsendable, prompt_bytes
from protocol.failures import Code
from protocol.from_worker import Tokenized
from protocol.peering import PeerModel
from protocol.prompts import Prompt
from protocol.to_worker import Detokenize, Generate, Tokenize

log = logging.getLogger(__name__)

D = TypeVar("D", SamplingDefaults, ThinkingDefaults)

DRAIN_POLL_S: Final = 0.02
# A load whose length is not known takes about so long.
LOAD_S: Final = 15.0
# Peers that a question is put to, one after the other.
ASKED_MAX: Final = 2


class Fleet:
    """Owns the peers, the places of conversations and the streams at peers; all on the event loop.

    `here` says what a request of a model would wait for at this daemon.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        link: WorkerLink,
        metrics: Metrics,
        tasks: TaskSet,
        here: Callable[[ModelConfig], CandidatePlace],
    ) -> None:
        self.link = link
        self.is_closing = False
        self.nodes: dict[str, PeerNode] = {}
        self.forms = Forms()
        self._pool = pool
        self._metrics = metrics
        self._tasks = tasks
        self._here = here
        self._affinity = Affinity()
        # Epochs of workers are above 0.
        self._epochs = itertools.count(-1, -1)
        self._streams = 0
        self._left: list[PeerNode] = []
        self._config = config
        self.apply(config)
        metrics.peers = self._numbers

    # -- life --------------------------------------------------------------------------------------------------------

    def apply(self, config: Config) -> None:
        """Put the peers of a configuration into force. What runs at one that was removed goes on there."""
        self._config = config
        nodes: dict[str, PeerNode] = {}
        for name, peer in config.peers.items():
            known = self.nodes.pop(name, None)
            if known is not None and known.config == peer:
                nodes[name] = known
                continue
            self._left += [] if known is None else [known]
            nodes[name] = PeerNode(peer, self.link.boot)
        self._left += self.nodes.values()
        self.nodes = nodes

    async def run(self) -> None:
        """Ask each peer for its status, once a second, until cancelled."""
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
        """Let what runs at peers finish until the deadline; then it ends, and its clients are told."""
        end = asyncio.get_running_loop().time() + deadline_s
        while self._streams and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 - tasks of many requests
            await asyncio.sleep(DRAIN_POLL_S)
        self.is_closing = True

    async def close(self) -> None:
        """Close the connections to all peers. Nothing is sent any more."""
        self.is_closing = True
        for node in (*self.nodes.values(), *self._left):
            await node.close()

    async def _poll(self, node: PeerNode) -> None:
        if await node.poll():
            self._affinity.forget(node.name)

    async def _close_removed(self) -> None:
        if self._streams == 0:
            left, self._left = self._left, []
            for node in left:
                await node.close()

    # -- names -------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> ModelConfig | None:
        """The model of a peer behind a name that this daemon has no model for: `PEER/NAME`, or what a peer calls it."""
        pinned, _, rest = name.partition("/")
        node = self.nodes.get(pinned)
        if node is not None and rest and (model := node.model(rest)) is not None:
            return _as_model(f"{pinned}/{model.name}", model, (model.name, *model.aliases))
        entries = list(self._entries(name))
        return None if not entries else _as_model(entries[0][1].name, entries[0][1], entries[0][1].aliases)

    def models(self) -> Iterator[tuple[ModelConfig, WorkerView]]:
        """The models of peers that no model of this daemon hides, each with how it is there."""
        seen = set(self._config.models)
        for node in self.nodes.values():
            if not node.is_up or node.status is None:
                continue
            for model in node.status.models:
                if model.name not in seen:
                    seen.add(model.name)
                    yield _as_model(model.name, model, model.aliases), _view(model)

    def view(self, name: str) -> WorkerView:
        """The state of a model that only peers have; stopped when none has it any more."""
        entries = list(self._served(name))
        return _view(entries[0][1]) if entries else WorkerView(name=name, path="", state=State.STOPPED)

    def _entries(self, name: str) -> Iterator[tuple[PeerNode, PeerModel]]:
        """Each peer that may be sent requests, with its model of this name, in the order of the configuration."""
        for node in self.nodes.values():
            if node.is_up and (model := node.model(name)) is not None:
                yield node, model

    def _served(self, name: str) -> Iterator[tuple[PeerNode, PeerModel]]:
        """The same for the name of a resolved model, which may be `PEER/NAME`."""
        pinned, _, rest = name.partition("/")
        node = self.nodes.get(pinned)
        if node is None or not rest or self._is_here(name):
            yield from self._entries(name)
        elif node.is_up and (model := node.model(rest)) is not None:
            yield node, model

    def _is_here(self, name: str) -> bool:
        return name in self._config.models

    # -- places ------------------------------------------------------------------------------------------------------

    def journey(
        self,
        model: ModelConfig,
        generates: list[Generate],
        request: str,
        on_move: Callable[[str], None],
        form: str = "",
    ) -> RequestRoute | None:
        """The way of a request; None where it can only run here. With `form` it begins where the model has that.

        One that goes on from an earlier answer stays: only this daemon is known to have generated that.
        """
        if not self.nodes or (self._is_here(model.name) and any(each.resume for each in generates)):
            return None
        tokens = sum(prompt_bytes(each) for each in generates[:1]) / BYTES_PER_TOKEN
        # Encoded already, as everything that is ready to be sent.
        prompt = cast("Prompt | msgspec.Raw", generates[0].prompt)
        scope = model.name, generates[0].cache_salt
        prefixes = prefixes_of(prompt, *scope) if isinstance(prompt, msgspec.Raw) else []
        return RequestRoute(self, model, prefixes, tokens, request, on_move, form=form)

    def candidates(self, model: ModelConfig, prefixes: list[Prefix], form: str | None) -> list[RouteCandidate]:
        """Places that have the model, this daemon first: all of one form, or of `form` if that is given."""
        warm = self._affinity.warm(prefixes)
        found: list[RouteCandidate] = []
        if self._is_here(model.name):
            here = self._here(model)
            found.append(RouteCandidate(_warmed(here, warm), self.forms.known(model)))
        for node, there in self._served(model.name):
            # A form that is not known is no other's.
            is_alike = not found or (there.form and there.form == found[0].form)
            if is_alike if form is None else there.form == form:
                found.append(RouteCandidate(_warmed(_place(node, there), warm), there.form, node, there))
        return found if form is None else [each for each in found if form and each.form == form]

    def has(self, model: ModelConfig, form: str | None) -> bool:
        """Whether a place has the model now, in `form` if that is given."""
        return bool(self.candidates(model, [], form))

    def open(
        self, candidate: RouteCandidate, model: str, on_loss: Callable[[PeerLost], None], request: str
    ) -> PeerStream:
        """A stream at a peer, which counts until it has ended. Raises `Unavailable` when its key cannot be read."""
        node, there = candidate.node, candidate.there
        assert node is not None, "a place elsewhere"
        assert there is not None, "with a model"
        try:
            stream = PeerStream(
                node,
                model,
                there,
                next(self._epochs),
                self.link,
                self._tasks,
                on_loss,
                {"x-request-id": request} if request else {},
            )
        except (OSError, ValueError) as error:
            node.failed("key")
            log.warning("peer %s: its key cannot be read: %s", node.name, error)
            raise Unavailable(f"The peer {node.name} cannot be asked.") from None
        stream.on_end = self._ended
        self._streams += 1
        return stream

    def chosen(self, model: str, choice: PlacementChoice, reason: str, prefixes: list[Prefix], tokens: float) -> None:
        """Note where a request goes; `model` is the name there."""
        name = choice.place.name
        self._affinity.note(prefixes, name)
        if name != HERE:
            self.nodes[name].sent[model] += max(0, int(tokens - choice.place.warm))
            self._metrics.forwarded[name, reason] += 1

    async def ensure_here(self, model: str) -> WorkerHandle:
        """This daemon's worker of a model, loaded. Raises `ModelUnavailable`."""
        return await self._pool.ensure_ready(model)

    async def ask(self, model: ModelConfig, question: Tokenize | Detokenize) -> Tokenized:
        """The answer of a peer, or of the next one where it is lost.

        Raises `CallRefused`, `WorkerGone`, `Unsendable`, `Unavailable`.
        """
        for candidate in self.candidates(model, [], None)[:ASKED_MAX]:
            stream = self.open(candidate, model.name, lambda _: None, "")
            try:
                return await self.link.call(stream.epoch, question)
            except Unsendable:
                stream.discard()
                raise
            except CallRefused as error:
                if error.failure.code is not Code.WORKER_DIED:
                    raise
        raise no_peer(model.name)

    def start(self, journey: RequestRoute, loss: PeerLost) -> None:
        """Let what was lost go on, in a task."""
        if self.is_closing:
            self.link.fail(loss.sequences, SHUTTING_DOWN)
            return
        log.warning(
            "%d sequences of %s lost their peer %s", len(loss.sequences), journey.model.name, loss.stream.node.name
        )
        self._metrics.reroutes[loss.stream.node.name] += len(loss.sequences)
        self._tasks.start(journey.go_on(loss), f"failover of {journey.model.name}")

    def _ended(self) -> None:
        self._streams -= 1

    def _numbers(self) -> Iterable[tuple[str, bool, dict[str, int]]]:
        """Name, whether it is up, and failures of each peer; for the metrics."""
        return [(name, node.is_up, dict(node.failures)) for name, node in self.nodes.items()]


def _place(node: PeerNode, model: PeerModel) -> CandidatePlace:
    load_s = 0.0 if model.state == State.READY else model.load_s or LOAD_S
    # What was sent since it last said how long its queue is comes on top.
    unseen = node.sent[model.name] / model.prefill_rate if model.prefill_rate else 0.0
    return CandidatePlace(node.name, model.wait_s + unseen, model.prefill_rate, load_s)


def _warmed(place: CandidatePlace, warm: dict[str, float]) -> CandidatePlace:
    return CandidatePlace(place.name, place.wait_s, place.rate, place.load_s, warm.get(place.name, 0.0))


def _as_model(name: str, model: PeerModel, aliases: tuple[str, ...]) -> ModelConfig:
    """A model of peers as requests see it: with the defaults and within the bounds that it has there."""
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
    """Defaults as the peer has them; what is not understood is none."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        return kind()


def _view(model: PeerModel) -> WorkerView:
    state = State(model.state) if model.state in set(State) else State.STOPPED
    return WorkerView(name=model.name, path="", state=state, ready=model.ready)
