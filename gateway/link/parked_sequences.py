"""Failover: sequences that have lost their worker are parked until its successor resumes them.

The gateway cannot see which request crashed a worker. Therefore each crash has suspects: the sequences that had no
token from that worker yet, because they were waiting or in their prefill.

- Most crashes are not a request's fault, so sequences that are not suspicious are resumed immediately.
- A sequence is suspicious if it was the only suspect of a crash, or had no token from two workers in a row.
  Suspicious sequences are resumed last, one after another, each when all sequences before it have a token. New
  requests wait until then. So the next crash has one suspect.
- A request that was the only suspect of two crashes in a row is quarantined.

Quarantine of requests that crash workers. Requests with the same fingerprint are refused until the fingerprint
expires.
"""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.link.link import WorkerLink
from gateway.link.sequence import LinkEvents, Sequence
from gateway.link.transport import WorkerGone
from protocol.failures import Code, Failure
from protocol.to_worker import Generate, Sampling

log = logging.getLogger(__name__)

EXPIRY_S: Final = 900.0
SIZE_MAX: Final = 256
REFUSED: Final = Failure(
    Code.QUARANTINED, "this request was refused: the model's worker died twice while it processed this very request"
)

_encoder = msgspec.msgpack.Encoder()


def fingerprint(request: Generate) -> bytes:
    """Return a digest of the fields that decide what a worker computes. The seed is left out, because it differs in
    retries.
    """
    computed = Generate(
        0,
        request.prompt,
        msgspec.structs.replace(request.sampling, seed=Sampling().seed),
        request.max_tokens,
        request.stop,
        request.top_logprobs,
        thinking_budget=request.thinking_budget,
        constraint=request.constraint,
        adapter=request.adapter,
        truncate=request.truncate,
        cuts_tokens=request.cuts_tokens,
        prompt_logprobs=request.prompt_logprobs,
        questions=request.questions,
    )
    return hashlib.blake2b(_encoder.encode(computed), digest_size=16).digest()


@dataclass(slots=True)
class Quarantine:
    """Refused fingerprints with their expiry in monotonic seconds. One model's `ParkedSequences` owns them."""

    _expiry: dict[bytes, float] = field(default_factory=dict[bytes, float])

    def add(self, digest: bytes, now: float) -> None:
        self._expiry.pop(digest, None)
        if len(self._expiry) >= SIZE_MAX:
            # A dict keeps its order, so the first entry is the one that expires first.
            del self._expiry[next(iter(self._expiry))]
        self._expiry[digest] = now + EXPIRY_S

    def refusal(self, request: Generate, now: float) -> Failure | None:
        """Return the reason to refuse a request, or None. No fingerprint is computed while the table is empty."""
        if not self._expiry or (digest := fingerprint(request)) not in self._expiry:
            return None
        if now < self._expiry[digest]:
            return REFUSED
        del self._expiry[digest]
        return None


# A sequence becomes suspicious when this many consecutive workers were lost before they sent a token of it.
SUSPICIOUS_RESUMES: Final = 2
# A worker that is still alive this long after it lost sequences has only lost its connection, and gets the sequences
# back.
RETURN_AFTER_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """Limits for one sequence: consecutive resumes without a new token, and resumes in total."""

    fruitless: int = 8
    total: int = 20
    # The other sequences wait at most this long for a suspicious sequence's first token.
    trial_s: float = 30.0


class ParkedSequences:
    """Parked sequences of one model, and the suspicion of those that may crash its workers.

    The link calls `park`. The worker's state machine reports the end of the worker (`on_crash`, `on_replacement` or
    `fail_all`), and calls `resume` when the next worker is ready.
    """

    def __init__(
        self, model: str, link: WorkerLink, events: LinkEvents, limits: ResumeLimits, now: Callable[[], float]
    ) -> None:
        self._model = model
        self._link = link
        self._events = events
        self._limits = limits
        self._now = now
        # `_lost` has the sequences of a worker whose exit is not known yet; `_waiting` has those that wait for the next
        # worker.
        self._lost: list[Sequence] = []
        self._lost_at = 0.0
        self._waiting: list[Sequence] = []
        # Resumed sequences without a token yet. They are watched if one of them is suspicious or a suspicious sequence
        # waits for them.
        self._watched: list[Sequence] = []
        self._watch_ends = 0.0
        # Fingerprint of the only suspect of the newest crash.
        self._crash_suspect: bytes | None = None
        # Requests that are known to crash workers.
        self.quarantine = Quarantine()

    @property
    def has_any(self) -> bool:
        """Whether a sequence waits for the next worker."""
        return any(not sequence.is_over for sequences in (self._lost, self._waiting) for sequence in sequences)

    @property
    def is_isolating(self) -> bool:
        """Whether new requests must wait, so that the next crash has one suspect."""
        return bool(self._waiting) or any(sequence.is_watched for sequence in self._watched)

    def park(self, sequence: Sequence) -> None:
        """Park a sequence that its worker has lost."""
        self._lost.append(sequence)
        self._lost_at = self._now()

    # -- end of a worker ---------------------------------------------------------------------------------------------

    def on_replacement(self) -> None:
        """Queue the lost sequences for the next worker. They do not become suspicious, because their worker did not
        crash.
        """
        self._waiting += [sequence for sequence in self._lost if not sequence.is_over]
        self._lost = []
        self._unwatch()

    def on_crash(self, failure: Failure) -> None:
        """Queue the lost sequences for the next worker. Fail those that were resumed too often, and the suspect of two
        crashes.
        """
        lost = [sequence for sequence in self._lost if not sequence.is_over]
        suspects = [sequence for sequence in lost if sequence.is_fresh]
        previous, self._crash_suspect = self._crash_suspect, _shared_fingerprint(suspects)
        for sequence in lost:
            sequence.fruitless_resumes = sequence.fruitless_resumes + 1 if sequence.is_fresh else 0
            is_alone = sequence.is_fresh and self._crash_suspect is not None
            sequence.is_suspicious = is_alone or sequence.fruitless_resumes >= SUSPICIOUS_RESUMES
        if self._crash_suspect is not None and self._crash_suspect == previous:
            self._quarantine_request(suspects)
        limits = self._limits
        exhausted = [each for each in lost if each.fruitless_resumes > limits.fruitless or each.resumes >= limits.total]
        if exhausted:
            log.error("model %s: %d sequences were resumed too often", self._model, len(exhausted))
            self._link.fail(exhausted, failure)
        self.on_replacement()

    def fail_all(self, failure: Failure) -> None:
        """Fail all parked sequences, because there is no next worker."""
        self._link.fail((*self._lost, *self._waiting), failure)
        self._lost, self._waiting = [], []
        self._unwatch()

    # -- the next worker ---------------------------------------------------------------------------------------------

    def resume(self, epoch: int) -> None:
        """Resume sequences on the ready worker of `epoch`, except those that wait for a suspicious one."""
        now = self._now()
        if self._lost and now - self._lost_at > RETURN_AFTER_S:
            self.on_replacement()
        self._watched = [sequence for sequence in self._watched if sequence.is_watched]
        waiting = [sequence for sequence in self._waiting if not sequence.is_over]
        # The sort is stable, so equal sequences stay in order of arrival.
        waiting.sort(key=lambda sequence: (sequence.is_suspicious, sequence.fruitless_resumes))
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
            self._events.sequences_resumed(self._model, sent)

    def expire(self) -> None:
        """End parked sequences whose deadline has passed, and a trial that took too long. Called once per heartbeat.
        The other parked sequences count as active, because their model is loading.
        """
        if self._watched and self._now() >= self._watch_ends:
            self._unwatch()
        if parked := [*self._lost, *self._waiting]:
            self._link.expire(parked)
            for sequence in parked:
                sequence.collector.note_activity()

    def _resume_one(self, epoch: int, sequence: Sequence, now: float, *, is_watched: bool) -> bool:
        if (refusal := self.quarantine.refusal(sequence.generate, self._now())) is not None:
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
        digest = fingerprint(suspects[0].generate)
        self.quarantine.add(digest, self._now())
        self._events.request_quarantined(self._model)
        self._crash_suspect = None
        same = [each for each in (*suspects, *self._waiting) if fingerprint(each.generate) == digest]
        self._link.fail(same, REFUSED)


def _shared_fingerprint(sequences: list[Sequence]) -> bytes | None:
    """Return the fingerprint that all sequences share, or None if they differ. Choices of one request share it."""
    digests = {fingerprint(sequence.generate) for sequence in sequences}
    return digests.pop() if len(digests) == 1 else None
