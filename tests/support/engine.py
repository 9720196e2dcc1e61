"""A real engine on a thread of its own, without sockets: requests go in, the terminal state of each comes out."""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from protocol import codec
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    Delta,
    DeltaKind,
    Drained,
    Finish,
    Progress,
    PromptLogprob,
    Rejected,
    Step,
    TokenLogprob,
    Up,
    Usage,
)
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Shutdown
from tests.support import threads
from tests.support.scale import patient
from worker.engine.gauges import Gauges
from worker.engine.inbox import Command, EngineInbox
from worker.engine.load_checks import choose
from worker.engine.loop import Engine
from worker.engine.rank_peers import RankPeers
from worker.engine.row import Row
from worker.errors import RequestInvalid
from worker.model.batch_mode import BatchModePlan
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import adapters_of
from worker.model.packing import disable_packing, packing_of
from worker.prompt.intake import Intake
from worker.prompt.limits_and_truncation import SparseLimits, is_restricted
from worker.speculation.drafter import Drafter
from worker.start.checked_model import load_checked

TIMEOUT_S = 60


@dataclass
class Result:
    """Everything a gateway would know of one sequence."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    accepted: int | None = None
    # Of the prompt.
    prompt_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    ending_ids: list[int] = field(default_factory=list)
    # Ids that an earlier worker has told.
    had: int = 0
    progress: list[tuple[int, int]] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None
    failure: Failure | None = None
    terminals: int = 0
    # After each message: how many ids and what text the client has.
    steps: list[tuple[int, str]] = field(default_factory=list)
    events: list[tuple[DeltaKind, str]] = field(default_factory=list)


def spec(path: Path, **settings: Any) -> WorkerSpec:
    return WorkerSpec(name="test", path=str(path), epoch=1, down="", up="", **settings)


# Plans of the models that this process has loaded, and whether each runs packed passes.
_PLANS: dict[tuple[object, ...], tuple[BatchModePlan, bool]] = {}


def checked_once(
    spec: WorkerSpec, model: Any, ids: Sequence[int], batching: str, rank_peers: RankPeers | None = None
) -> BatchModePlan:
    """The self-check of the first load of these files; later loads are told what it found."""
    files = sorted(Path(spec.path).glob("*")) if Path(spec.path).is_dir() else []
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = spec.path, spec.dtype, spec.kv_bits, spec.experts, batching, *ids, *stamps
    if key not in _PLANS:
        plan = choose(model, ids, batching, rank_peers)
        _PLANS[key] = plan, packing_of(model) is not None
    plan, is_packed = _PLANS[key]
    if not is_packed:
        disable_packing(model)
    return plan


def _no_progress(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


class EngineHarness:
    """`with EngineHarness(spec) as engine: engine.run([Generate(…)])`."""

    def __init__(
        self,
        spec: WorkerSpec,
        wrap: Callable[[Any], Any] = lambda model: model,
        drafter: Drafter | Callable[[LoadedModel], Drafter] | None = None,
        keeps: str = "",
        check: Callable[[Any, Sequence[int], str, RankPeers | None], BatchModePlan] | None = None,
    ) -> None:
        self.spec = spec
        self._check = check or partial(checked_once, spec)
        self._keeps = keeps
        self._wrap = wrap
        self._drafter = drafter
        self.gauges = Gauges()
        self.results: dict[int, Result] = {}
        self.ended: list[int] = []  # rids, in the order of their terminal events
        self.drained: list[int] = []  # how many rows each drain aborted
        self.error: Exception | None = None
        # Called in the engine's thread with each message, which is in `results` by then.
        self.observe: Callable[[Up], None] = lambda _: None
        self._has_ended = False
        self._inbox = EngineInbox()
        self.changed = threading.Condition()
        self._is_loaded = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_loaded.wait(patient(TIMEOUT_S))
        if self.error is not None:
            raise self.error
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.put(Shutdown())
        threads.join(self._thread, TIMEOUT_S)

    def _main(self) -> None:
        try:
            loaded = load_checked(self.spec, _no_progress, check=self._check)
            self.loaded = replace(loaded, model=self._wrap(loaded.model))
            self.adapters = adapters_of(loaded.model)
            limits = SparseLimits(self.spec.sparse_keep, self.spec.sparse_from)
            self.intake = Intake(self.loaded, self.spec.parser, sparse=limits)
            drafter = self.drafter = self._drafter(self.loaded) if callable(self._drafter) else self._drafter
            self.engine = Engine(
                self.loaded,
                self.spec,
                self._inbox,
                self._receive,
                self.gauges,
                self.intake.writer,
                drafter,
                keeps=self._keeps,
            )
            self.engine.warm_up(list(range(8)))
            self.kv_cost = self.engine.kv_cost
            self._is_loaded.set()
            self.engine.run()
        except Exception as error:
            self.error = error
            if self._is_loaded.is_set():
                self.engine.fail_all(Failure(Code.INTERNAL, "step loop failed"))
            self._is_loaded.set()
        finally:
            with self.changed:
                self._has_ended = True
                self.changed.notify_all()

    def _receive(self, message: Up) -> None:
        codec.encode(message)
        with self.changed:
            match message:
                case Accepted():
                    self.results[message.rid].accepted = message.prompt_tokens
                case Progress():
                    self.results[message.rid].progress.append((message.processed, message.total))
                case Rejected():
                    result = self.results[message.rid]
                    result.failure, result.terminals = message.failure, result.terminals + 1
                    self.ended.append(message.rid)
                case Drained():
                    self.drained.append(message.aborted)
                case Step():
                    for delta in message.deltas:
                        self._take(delta)
                    for result in {delta.rid: self.results[delta.rid] for delta in message.deltas}.values():
                        result.steps.append((len(result.ids), result.text))
                case _:
                    pass
            self.observe(message)
            self.changed.notify_all()

    def _take(self, delta: Delta) -> None:
        result = self.results[delta.rid]
        assert result.terminals == 0, "a delta after the terminal one"
        result.deltas.append(delta)
        result.text += delta.text
        result.ids += delta.token_ids
        result.logprobs += delta.logprobs or ()
        result.ending_ids += delta.ending_ids
        if delta.prompt is not None:
            result.prompt_ids += delta.prompt.ids
            result.prompt_logprobs += delta.prompt.logprobs
        if delta.text:
            result.events.append((delta.kind, delta.text))
        if delta.finish is not None:
            result.finish, result.usage, result.failure = delta.finish, delta.usage, delta.failure
            result.terminals += 1
            self.ended.append(delta.rid)
            if delta.usage is not None:
                told = result.had + len(result.ids) + len(result.ending_ids)
                assert delta.usage.completion == told, "every sampled id is told once"

    def submit(self, request: Generate, processors: Iterable[Any] = ()) -> Result:
        result = self.results[request.rid] = Result()
        try:
            row: Row = self.intake.row(request, time.monotonic())
            if is_restricted(request):
                self.intake.rules.restrict(row, request)
        except RequestInvalid as error:
            self._receive(Rejected(request.rid, error.failure))
            return result
        row.processors = list(processors)
        result.had = len(request.resume)
        return self.submit_row(row)

    def submit_row(self, row: Row) -> Result:
        """A row that a test has made its own changes to."""
        result = self.results.setdefault(row.rid, Result())
        self._inbox.put(row)
        return result

    def command(self, command: Command) -> None:
        self._inbox.put(command)

    def wait(self, condition: Any, what: str = "the condition") -> None:
        """Until `condition()` holds; messages wake it."""
        deadline = time.monotonic() + patient(TIMEOUT_S)
        with self.changed:
            while not condition():
                assert not self._has_ended, f"the engine ended before {what}: {self.error!r}"
                if not self.changed.wait(deadline - time.monotonic()):
                    faulthandler.dump_traceback(sys.__stderr__)
                    raise AssertionError(f"timed out waiting for {what}; stderr has where each thread is")

    def run(self, requests: Iterable[Generate]) -> list[Result]:
        """Submit all at once and wait for every terminal event."""
        results = [self.submit(request) for request in requests]
        self.wait(lambda: all(result.terminals for result in results), "all terminal events")
        return results
