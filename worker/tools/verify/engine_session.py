"""Session of one engine on the calling thread, and the output of each of its requests."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from protocol.failures import Failure
from protocol.from_worker import Delta, Finish, Rejected, Step, TokenLogprob, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Shutdown
from worker.engine.gauges import Gauges
from worker.engine.inbox import EngineInbox
from worker.engine.loop import Engine
from worker.engine.rank_peers import RankPeers
from worker.engine.scheduling.kv_budget import KvCost
from worker.model.loader import LoadedModel
from worker.prompt.intake import Intake
from worker.speculation.drafter import Drafter

WRITE_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class VerifiedOutput:
    """Output of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    failure: Failure | None = None
    cached: int = 0
    # Log-probability of each token of the prompt but the first, if the request asks for them.
    prompt_logprobs: list[float] = field(default_factory=list)
    # Time of the monotonic clock when the request was sent, and seconds from then to its first token.
    sent: float = 0.0
    first_token_s: float | None = None

    def take(self, delta: Delta) -> None:
        if delta.prompt is not None:
            self.prompt_logprobs += [each.logprob for each in delta.prompt.logprobs if each.rank]
        if delta.token_ids and self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.sent
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish is not None:
            self.finish, self.failure = delta.finish, delta.failure
            self.cached = delta.usage.cached if delta.usage is not None else 0


class EngineSession:
    """Engine that runs on the calling thread, from warm-up to shutdown."""

    def __init__(
        self,
        loaded: LoadedModel,
        intake: Intake,
        spec: WorkerSpec,
        drafter: Drafter | None = None,
        rank_peers: RankPeers | None = None,
    ) -> None:
        self.gauges = Gauges()
        self._intake = intake
        self._inbox = EngineInbox()
        self._engine = Engine(
            loaded, spec, self._inbox, self._receive, self.gauges, intake.writer, drafter, rank_peers=rank_peers
        )
        self._outputs: dict[int, VerifiedOutput] = {}
        self._waves: list[Sequence[Generate]] = []
        self._open: set[int] = set()

    def run(self, waves: Sequence[Sequence[Generate]]) -> list[VerifiedOutput]:
        """Run the requests of each wave together, one wave after another. Return the newest output of each request."""
        self._engine.warm_up([1] * 8)
        self._waves = list(waves)
        self._next_wave()
        self._engine.run()
        return [output for _, output in sorted(self._outputs.items())]

    @property
    def kv_cost(self) -> KvCost:
        return self._engine.kv_cost

    def _receive(self, message: Up) -> None:
        match message:
            case Step():
                for delta in message.deltas:
                    self._outputs[delta.rid].take(delta)
                    if delta.finish is not None:
                        self._end(delta.rid)
            case Rejected(rid, failure):
                self._outputs[rid].failure = failure
                self._end(rid)
            case _:
                pass

    def _end(self, rid: int) -> None:
        self._open.discard(rid)
        if not self._open:
            self._next_wave()

    def _next_wave(self) -> None:
        if not self._waves:
            # The engine queues the last rows' prefixes for the disk only after this point, so another thread waits for
            # the writes.
            threading.Thread(target=self._stop_when_written, daemon=True).start()
            return
        wave = self._waves.pop(0)
        self._open = {request.rid for request in wave}
        for request in wave:
            self._outputs[request.rid] = VerifiedOutput(sent=time.monotonic())
            self._inbox.put(self._intake.row(request, time.monotonic()))

    def _stop_when_written(self) -> None:
        disk = self._engine.cache.disk
        if disk is not None:
            end = time.monotonic() + WRITE_TIMEOUT_S
            time.sleep(0.2)
            while disk.queued_bytes and time.monotonic() < end:
                time.sleep(0.01)
        self._inbox.put(Shutdown())
