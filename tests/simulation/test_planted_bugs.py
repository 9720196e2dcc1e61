"""Whether the simulation finds bugs: each is planted in the simulated gateway, and seeds are played until one fails."""

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from gateway.access.keyring import Keyring
from gateway.access.ledger import Ledger
from gateway.access.rate_limit import Meter, UsageCharge
from gateway.api.openai.choices import ChoiceStream
from gateway.link.collector import Collector
from gateway.link.link import WorkerLink
from gateway.link.sequence import Sequence as Parked
from gateway.link.transport import Transport
from gateway.request.body_memory import BodyLease
from gateway.request.generation import Generation
from protocol.from_worker import Delta
from protocol.to_worker import Abort, Generate
from tests.simulation.collector import rare_collections
from tests.simulation.story import Result, play

SEEDS = 300
Plant = Callable[[pytest.MonkeyPatch], None]


def leases_of_unopened_requests_are_kept(patch: pytest.MonkeyPatch) -> None:
    leave, kept = Generation.__exit__, list[Generation]()

    def exit_(self: Generation, *error: Any) -> None:
        if self.is_open:
            leave(self, *error)
        else:
            kept.append(self)

    patch.setattr(Generation, "__exit__", exit_)


def first_delta_after_a_failover_is_dropped(patch: pytest.MonkeyPatch) -> None:
    resume, append, resumed = WorkerLink.resume, Collector.append_delta, set[int]()

    def resume_(self: WorkerLink, epoch: int, sequence: Parked) -> None:
        resume(self, epoch, sequence)
        resumed.add(sequence.rid)

    def append_(self: Collector, delta: Delta, now: float) -> None:
        if delta.rid in resumed and delta.finish is None:
            resumed.discard(delta.rid)
        else:
            append(self, delta, now)

    patch.setattr(WorkerLink, "resume", resume_)
    patch.setattr(Collector, "append_delta", append_)


def end_of_a_stream_is_written_twice(patch: pytest.MonkeyPatch) -> None:
    end = ChoiceStream.end
    patch.setattr(ChoiceStream, "end", lambda self, *given: end(self, *given) * 2)


def sequences_of_a_key_never_go_down(patch: pytest.MonkeyPatch) -> None:
    hold = Meter.hold

    @contextmanager
    def hold_(self: Meter, estimate: float, sequences: int = 1) -> Generator[UsageCharge]:
        with hold(self, estimate, sequences) as charge:
            yield charge
        self._numbers.sequences += sequences

    patch.setattr(Meter, "hold", hold_)


def memory_of_bodies_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BodyLease, "close", lambda self: None)


def aborts_are_not_sent(patch: pytest.MonkeyPatch) -> None:
    send = Transport.try_send

    def send_(self: Transport, connection: Any, message: Any) -> None:
        if not isinstance(message, Abort):
            send(self, connection, message)

    patch.setattr(Transport, "try_send", send_)


def usage_is_recorded_twice(patch: pytest.MonkeyPatch) -> None:
    record = Ledger.record

    def record_(self: Ledger, *usage: Any) -> None:
        record(self, *usage)
        record(self, *usage)

    patch.setattr(Ledger, "record", record_)


def deadlines_have_no_timer(patch: pytest.MonkeyPatch) -> None:
    submit = WorkerLink.submit

    def submit_(self: WorkerLink, worker: Any, requests: list[Generate]) -> Collector:
        collector = submit(self, worker, requests)
        for rid in collector.rids:
            sequence = self._sequences.get(rid)
            if sequence is not None and sequence.timer is not None:
                sequence.timer.cancel()
        return collector

    patch.setattr(WorkerLink, "submit", submit_)


def sequences_are_resumed_without_their_last_token(patch: pytest.MonkeyPatch) -> None:
    rest = Parked.continuation

    def rest_(self: Parked, now: float) -> Generate:
        request = rest(self, now)
        return msgspec.structs.replace(request, resume=request.resume[:-1])

    patch.setattr(Parked, "continuation", rest_)


def revoked_keys_stay_valid(patch: pytest.MonkeyPatch) -> None:
    apply = Keyring._apply

    def apply_(self: Keyring, stamp: Any) -> None:
        before = self._by_prefix
        apply(self, stamp)
        self._by_prefix = before | self._by_prefix

    patch.setattr(Keyring, "_apply", apply_)


# What the failure says, so that a bug is not found by another check that fails for a reason of its own.
FOUND_AT_ONCE: Sequence[tuple[Plant, str]] = (
    (leases_of_unopened_requests_are_kept, "left behind: .*'admitted'"),
    (sequences_of_a_key_never_go_down, "sequences of (alice|bob)"),
    (usage_is_recorded_twice, "is recorded|are recorded|the ledger has"),
)
BUGS: Sequence[tuple[Plant, str]] = (
    (first_delta_after_a_failover_is_dropped, "is not the model's answer|are counted|finished as"),
    (end_of_a_stream_is_written_twice, "after the mark of the stream's end|two usages"),
    (memory_of_bodies_is_not_given_back, "bytes of bodies"),
    (aborts_are_not_sent, "was not told to abort"),
    (deadlines_have_no_timer, "after its deadline|its limit is"),
    (sequences_are_resumed_without_their_last_token, "is resumed with|is not the model's answer|are counted"),
    (revoked_keys_stay_valid, "is not in force, and gets 200"),
)


def first_failure(most: int) -> Result | None:
    with rare_collections():
        return next((result for result in map(play, range(most)) if result.failure is not None), None)


def find(plant: Plant, words: str, patch: pytest.MonkeyPatch, most: int) -> None:
    plant(patch)
    failed = first_failure(most)
    assert failed is not None, f"not found in {most} seeds"
    print(f"{plant.__name__}: seed {failed.seed}: {failed.failure}"[:300])
    assert re.search(words, str(failed.failure)), failed.failure


@pytest.mark.parametrize(("plant", "words"), FOUND_AT_ONCE, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found_in_ten_seeds(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find(plant, words, monkeypatch, 10)


@pytest.mark.soak
@pytest.mark.parametrize(("plant", "words"), BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_found_in_three_hundred_seeds(
    plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(plant, words, monkeypatch, SEEDS)
