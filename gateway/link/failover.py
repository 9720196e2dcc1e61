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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.link.events import LinkEvents
from gateway.link.link import WorkerLink
from gateway.link.quarantine import REFUSED, Quarantine, fingerprint
from gateway.link.sequence import Sequence
from gateway.link.transport import WorkerGone
from protocol.failures import Failure
from protocol.to_worker import Generate

log = logging.getLogger(__name__)

# So many workers in a row that sent no token of a sequence make it suspicious.
SUSPICIOUS_AFTER: Final = 2
# A worker that gave up sequences and did not exit within this has only lost touch with us: it gets them back.
STRANDED_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """How often a sequence may be given to another worker: in a row without a new token, and at all."""

    fruitless: int = 8
    total: int = 20
    # How long the others wait for the first token of one that is suspected of crashing workers.
    trial_s: float = 30.0


class ParkedSequences:
    """Parked sequences of one model, and which of them may crash its workers.

    The link alone puts sequences in: `park` is where the connections of the model's workers lead to. The worker's state
    machine says what became of the worker (`crashed`, `replaced` or `gone`) and when its successor serves (`resume`).
    """

    def __init__(
        self, model: str, link: WorkerLink, events: LinkEvents, limits: ResumeLimits, now: Callable[[], float]
    ) -> None:
        self._model = model
        self._link = link
        self._events = events
        self._limits = limits
        self._now = now
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
        return bool(self._waiting) or any(sequence.is_watched for sequence in self._watched)

    def refusal(self, request: Generate) -> Failure | None:
        """The reason to refuse a request that is known to crash workers."""
        return self._quarantine.refusal(request, self._now())

    def park(self, sequence: Sequence) -> None:
        """Take a sequence whose worker is gone, or has given it up. The link's alone."""
        self._lost.append(sequence)
        self._lost_at = self._now()

    # -- what became of the worker -----------------------------------------------------------------------------------

    def replaced(self) -> None:
        """Queue the lost ones for the next worker. Theirs did not crash, or the gateway ended it: none is suspected."""
        self._waiting += [sequence for sequence in self._lost if not sequence.is_over]
        self._lost = []
        self._unwatch()

    def crashed(self, failure: Failure) -> None:
        """Queue the lost ones for the next worker; fail those that were resumed too often, or crashed two workers."""
        lost = [sequence for sequence in self._lost if not sequence.is_over]
        suspects = [sequence for sequence in lost if sequence.is_fresh]
        before, self._suspect_of_crash = self._suspect_of_crash, _only(suspects)
        for sequence in lost:
            sequence.fruitless = sequence.fruitless + 1 if sequence.is_fresh else 0
            is_alone = sequence.is_fresh and self._suspect_of_crash is not None
            sequence.is_suspicious = is_alone or sequence.fruitless >= SUSPICIOUS_AFTER
        if self._suspect_of_crash is not None and self._suspect_of_crash == before:
            self._quarantine_request(suspects)
        limits = self._limits
        exhausted = [each for each in lost if each.fruitless > limits.fruitless or each.resumes >= limits.total]
        if exhausted:
            log.error("model %s: %d sequences were resumed too often", self._model, len(exhausted))
            self._link.fail(exhausted, failure)
        self.replaced()

    def gone(self, failure: Failure) -> None:
        """End all of them: there is no next worker."""
        self._link.fail((*self._lost, *self._waiting), failure)
        self._lost, self._waiting = [], []
        self._unwatch()

    # -- the next worker ---------------------------------------------------------------------------------------------

    def resume(self, epoch: int) -> None:
        """Send the worker of `epoch`, which serves, those that it may have now."""
        now = self._now()
        if self._lost and now - self._lost_at > STRANDED_S:
            self.replaced()
        self._watched = [sequence for sequence in self._watched if sequence.is_watched]
        waiting = [sequence for sequence in self._waiting if not sequence.is_over]
        # Stable: otherwise in order of arrival.
        waiting.sort(key=lambda sequence: (sequence.is_suspicious, sequence.fruitless))
        sent = 0
        try:
            while waiting and not (waiting[0].is_suspicious and self._watched):
                sent += self._resume_one(epoch, waiting[0], now, is_watched=waiting[-1].is_suspicious)
                del waiting[0]
        except WorkerGone:
            log.info("model %s: worker #%d cannot be reached, sequences wait for the next one", self._model, epoch)
        self._waiting = waiting
        if sent:
            log.info("model %s: %d sequences go on at worker #%d, %d wait", self._model, sent, epoch, len(waiting))
            self._events.resumed(self._model, sent)

    def expire(self) -> None:
        """Expire deadlines and trials, once per heartbeat. A parked sequence counts as active: its model is loading."""
        if self._watched and self._now() >= self._watch_ends:
            self._unwatch()
        if parked := [*self._lost, *self._waiting]:
            self._link.expire(parked)
            for sequence in parked:
                sequence.collector.touch()

    def _resume_one(self, epoch: int, sequence: Sequence, now: float, *, is_watched: bool) -> bool:
        if (refusal := self.refusal(sequence.generate)) is not None:
            self._link.fail([sequence], refusal)
            return False
        self._link.resume(epoch, sequence)
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

    def _quarantine_request(self, suspects: list[Sequence]) -> None:
        log.error("model %s: request %d was alone at two crashes and is quarantined", self._model, suspects[0].rid)
        poison = fingerprint(suspects[0].generate)
        self._quarantine.add(poison, self._now())
        self._events.quarantined(self._model)
        self._suspect_of_crash = None
        same = [each for each in (*suspects, *self._waiting) if fingerprint(each.generate) == poison]
        self._link.fail(same, REFUSED)


def _only(sequences: list[Sequence]) -> bytes | None:
    """The fingerprint that all of them share; choices of one request share theirs."""
    only: bytes | None = None
    for sequence in sequences:
        own = fingerprint(sequence.generate)
        if only is not None and own != only:
            return None
        only = own
    return only
