"""Failover: sequences that lost their worker, parked until its successor resumes them.

The request that crashes a worker cannot be seen from outside. So each crash has suspects: the sequences that had not
had a token from that worker, which were waiting or in their prefill.

- Most crashes are not a request's fault: all sequences are resumed at once, except
- the suspicious: the only suspect of a crash, or one that had no token from two workers in a row. They are resumed
  last, one after another, each when all before it have a token; new requests wait until then. So the next crash has
  one suspect.
- A request that was the only suspect of two crashes in a row is quarantined.
"""

import logging
from collections.abc import Iterable
from typing import Final

from gateway.link.sequence import Runner, Sequence
from gateway.link.transport import WorkerGone
from gateway.workers.supervisor.ports import WorkerWire
from gateway.workers.supervisor.quarantine import REFUSED, Quarantine, fingerprint
from gateway.workers.supervisor.state import Events, WorkerLimits
from protocol.failures import Failure
from protocol.messages import Generate

log = logging.getLogger(__name__)

# So many workers in a row that sent no token of a sequence make it suspicious.
SUSPICIOUS_AFTER: Final = 2
FORGOTTEN_S: Final = 0.5


class ParkedSequences:
    """Parked sequences of one model, and which of them may crash its workers. Owned by the worker's state machine."""

    def __init__(self, model: str, wire: WorkerWire, events: Events, limits: WorkerLimits) -> None:
        self._model = model
        self._wire = wire
        self._events = events
        self._limits = limits
        # Parked from a worker whose end is not known yet, and queued for the next worker.
        self._lost: list[Sequence] = []
        self._lost_at = 0.0
        self._waiting: list[Sequence] = []
        # Resumed and without a token yet, while a suspicious one waits for them or is among them.
        self._watched: list[Sequence] = []
        self._watch_ends = 0.0
        # The fingerprint of the only suspect of the newest crash.
        self._suspect_of_crash: bytes | None = None
        self._quarantine = Quarantine()

    @property
    def has_any(self) -> bool:
        """Whether a sequence waits for the next worker."""
        return any(not sequence.is_over for sequences in (self._lost, self._waiting) for sequence in sequences)

    @property
    def is_isolating(self) -> bool:
        """Whether new requests must wait, so that a crash has one suspect."""
        return bool(self._waiting or self._watched)

    def refusal(self, request: Generate, now: float) -> Failure | None:
        return self._quarantine.refusal(request, now)

    def park(self, sequences: Iterable[Sequence], now: float) -> None:
        self._lost.extend(sequences)
        self._lost_at = now

    def requeue(self) -> None:
        """Queue the lost ones for the next worker. Theirs did not crash, or the gateway ended it: none is suspected."""
        self._waiting += [sequence for sequence in self._lost if not sequence.is_over]
        self._lost = []
        self._unwatch()

    def after_crash(self, failure: Failure, now: float) -> None:
        """Queue the lost ones for the next worker; fail those that were resumed too often, or crashed two workers."""
        lost = [sequence for sequence in self._lost if not sequence.is_over]
        suspects = [sequence for sequence in lost if sequence.is_fresh]
        before, self._suspect_of_crash = self._suspect_of_crash, _only(suspects)
        for sequence in lost:
            sequence.fruitless = sequence.fruitless + 1 if sequence.is_fresh else 0
            is_alone = sequence.is_fresh and self._suspect_of_crash is not None
            sequence.is_suspicious = is_alone or sequence.fruitless >= SUSPICIOUS_AFTER
        if self._suspect_of_crash is not None and self._suspect_of_crash == before:
            self._quarantine_request(suspects, now)
        limits = self._limits
        exhausted = [f for f in lost if f.fruitless > limits.fruitless_resumes or f.resumes >= limits.resumes]
        if exhausted:
            log.error("model %s: %d sequences were resumed too often", self._model, len(exhausted))
            self._wire.fail(exhausted, failure)
        self.requeue()

    def resume(self, runner: Runner, now: float) -> None:
        """Send the worker those that it may have now."""
        waiting = [sequence for sequence in self._waiting if not sequence.is_over]
        # Stable: otherwise in order of arrival.
        waiting.sort(key=lambda sequence: (sequence.is_suspicious, sequence.fruitless))
        sent = 0
        try:
            while waiting and not (waiting[0].is_suspicious and self._watched):
                sent += self._resume_one(runner, waiting[0], now, is_watched=waiting[-1].is_suspicious)
                del waiting[0]
        except WorkerGone:
            runner.suspect()
        self._waiting = waiting
        if sent:
            log.info(
                "model %s: %d sequences go on at worker #%d, %d wait", self._model, sent, runner.epoch, len(waiting)
            )
            self._events.resumed(self._model, sent)

    def note_progress(self) -> None:
        """A watched sequence has its first token, or has ended."""
        self._watched = [sequence for sequence in self._watched if sequence.is_watched]

    def has_stranded(self, now: float) -> bool:
        """Whether a worker gave up sequences and did not exit afterwards."""
        return bool(self._lost) and now - self._lost_at > FORGOTTEN_S

    def expire(self, now: float) -> None:
        """Expire deadlines and trials, once per heartbeat. A parked sequence counts as active: its model is loading."""
        if self._watched and now >= self._watch_ends:
            self._unwatch()
        if self._lost or self._waiting:
            self._wire.expire([*self._lost, *self._waiting])
            for sequence in (*self._lost, *self._waiting):
                sequence.collector.touch()

    def fail(self, failure: Failure) -> None:
        """End all of them: there is no next worker."""
        self._wire.fail((*self._lost, *self._waiting), failure)
        self._lost, self._waiting = [], []
        self._unwatch()

    def _resume_one(self, runner: Runner, sequence: Sequence, now: float, *, is_watched: bool) -> bool:
        if (refusal := self.refusal(sequence.generate, now)) is not None:
            self._wire.fail([sequence], refusal)
            return False
        self._wire.resume(runner, sequence)
        if sequence.is_over:
            return False
        if is_watched:
            sequence.is_watched = True
            self._watched.append(sequence)
            self._watch_ends = now + self._limits.trial_s
        return True

    def _unwatch(self) -> None:
        for sequence in self._watched:
            sequence.is_watched = False
        self._watched = []

    def _quarantine_request(self, suspects: list[Sequence], now: float) -> None:
        log.error("model %s: request %d was alone at two crashes and is quarantined", self._model, suspects[0].rid)
        poison = fingerprint(suspects[0].generate)
        self._quarantine.add(poison, now)
        self._events.quarantined(self._model)
        self._suspect_of_crash = None
        self._wire.fail([f for f in (*suspects, *self._waiting) if fingerprint(f.generate) == poison], REFUSED)


def _only(sequences: list[Sequence]) -> bytes | None:
    """The fingerprint that all of them share; choices of one request share theirs."""
    only: bytes | None = None
    for sequence in sequences:
        own = fingerprint(sequence.generate)
        if only is not None and own != only:
            return None
        only = own
    return only
