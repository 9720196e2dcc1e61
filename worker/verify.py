"""`python -m worker.verify`: is a request's output its own, however it is run?

Runs the same requests alone, then batched, chunked, from caches, preempted, resumed and with drafts, and compares
every token. Prints a `protocol.verify.Check` a line. Exit statuses: 0 all equal · 1 a difference, or a check that
proved nothing · else as a worker's.
"""

import argparse
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec.structs import replace

from protocol.failures import Exit, Failure
from protocol.kinds import AUDIO, TEXT
from protocol.messages import (
    ChatPrompt,
    Delta,
    Finish,
    Generate,
    Rejected,
    Sampling,
    Shutdown,
    Step,
    TextPrompt,
    TokenLogprob,
    TokensPrompt,
    Up,
)
from protocol.spec import WorkerSpec, read_spec
from protocol.verify import Check, Difference
from worker.adapters.adapters import adapters_of
from worker.checked_model import load_checked
from worker.embedding.load_model import kind_of_spec, load_reader
from worker.engine.gauges import Gauges
from worker.engine.inbox import Inbox
from worker.engine.kv_budget import KvCost
from worker.engine.kv_check import without_codes
from worker.engine.loop import Engine
from worker.engine.partners import Partners
from worker.errors import LoadFailed, PartnerLost, RequestInvalid
from worker.group.lead import open_group
from worker.model import memory
from worker.model.loader import Loaded
from worker.prompt.intake import Intake
from worker.prompt.sparse_limits import SparseLimits
from worker.sparse.kept import BLOCK
from worker.speculation.drafter import Drafter, Proposer
from worker.speculation.eager import EagerDrafts
from worker.speculation.noisy import NoisyDrafts
from worker.verify_reader import reader_checks
from worker.vision.samples import picture

DIFFERENT: Final = 1
# Words of the longest prompt. The others are parts of that; every other request continues a beginning that they share.
LONGEST_WORDS: Final = 160
PARTS: Final = (0.02, 0.15, 0.5, 1.0)
SHARED_PART: Final = 0.375
SMALL_CHUNK: Final = 32
# Tokens of a draft that a model's head is asked for.
DRAFTED: Final = 3
CACHE_BYTES: Final = 1 << 30
DISK_BYTES: Final = 4 << 30
WRITE_TIMEOUT_S: Final = 60.0
# Rows of this many tokens outgrow what admission counts on, so that memory for fewer makes one of them leave. The
# first part of their output is given to them: what they say of it themselves crosses the border.
CROWD: Final = 3
CROWD_PROMPT: Final = 240
CROWD_GIVEN: Final = 250
CROWD_OUTPUT: Final = 290
CROWD_TOKENS: Final = 512
# Sparse prompts: of ten blocks eight are kept.
SPARSE_ROWS: Final = 3
SPARSE_PROMPT: Final = 10 * BLOCK
SPARSE_KEEP: Final = 0.8
SPARSE_OUTPUT: Final = 12
WORDS: Final = (
    "time", "people", "water", "light", "house", "river", "stone", "music", "paper", "green", "small", "early", "under",
    "after", "between", "never", "always", "because",
)  # fmt: skip


@dataclass(slots=True)
class Output:
    """Output of one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    failure: Failure | None = None
    cached: int = 0

    def take(self, delta: Delta) -> None:
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish is not None:
            self.finish, self.failure = delta.finish, delta.failure
            self.cached = delta.usage.cached if delta.usage is not None else 0


class Session:
    """One engine from warm-up to shutdown, on the calling thread."""

    def __init__(
        self,
        loaded: Loaded,
        intake: Intake,
        spec: WorkerSpec,
        drafter: Drafter | None = None,
        partners: Partners | None = None,
    ) -> None:
        self.gauges = Gauges()
        self._intake = intake
        self._inbox = Inbox()
        self._engine = Engine(
            loaded, spec, self._inbox, self._receive, self.gauges, intake.writer, drafter, partners=partners
        )
        self._outputs: dict[int, Output] = {}
        self._waves: list[Sequence[Generate]] = []
        self._open: set[int] = set()

    def run(self, waves: Sequence[Sequence[Generate]]) -> list[Output]:
        """Each wave together, one wave after the other. Returns the newest output of each request."""
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
            # What the last rows leave is handed to the disk after this.
            threading.Thread(target=self._stop_when_written, daemon=True).start()
            return
        wave = self._waves.pop(0)
        self._open = {request.rid for request in wave}
        for request in wave:
            self._outputs[request.rid] = Output()
            self._inbox.put(self._intake.row(request, time.monotonic()))

    def _stop_when_written(self) -> None:
        disk = self._engine.cache.disk
        if disk is not None:
            end = time.monotonic() + WRITE_TIMEOUT_S
            time.sleep(0.2)
            while disk.queued_bytes and time.monotonic() < end:
                time.sleep(0.01)
        self._inbox.put(Shutdown())


class Verifier:
    """All checks of one model. The first one, alone and without caches, is what the others are compared with."""

    def __init__(
        self,
        loaded: Loaded,
        spec: WorkerSpec,
        tokens: int,
        words: int = LONGEST_WORDS,
        partners: Partners | None = None,
    ) -> None:
        self._partners = partners
        self._loaded = loaded
        self._intake = Intake(loaded, spec.parser, sparse=SparseLimits(spec.sparse_keep))
        # Nothing is kept from one request to the next, unless a check says so.
        self._spec = replace(
            spec, cache_bytes=0, disk_cache_dir="", disk_cache_bytes=0, max_running=16, speculate="off"
        )
        self._requests = _requests(tokens, words, loaded.max_context)
        # Each adapter under the first of the texts.
        self._adapted = _adapted(loaded, self._requests)
        self._requests += self._adapted
        # The first two show two pictures under the same text.
        self._pictured: list[Generate] = []
        if "image" in self._intake.modalities:
            self._pictured = _pictured(len(self._requests) + 1, tokens)
            self._requests += self._pictured
        self._alone: list[Output] = []

    def checks(self) -> Generator[Check]:
        requests, spec = self._requests, self._spec
        self._alone = self._session(spec).run([[request] for request in requests])
        if failed := next((output.failure for output in self._alone if output.failure is not None), None):
            yield Check("alone", len(requests), note=failed.message)
            return
        yield self._compare("alone", self._alone)
        if self._spec.adapters:
            yield self._adapters_told_apart()
        if self._pictured:
            yield self._told_apart()
        yield self._compare("batched", self._session(spec).run([requests]))
        small = replace(spec, prefill_chunk=SMALL_CHUNK)
        yield self._compare(f"chunks of {SMALL_CHUNK}", self._session(small).run([requests]))
        yield from self._cached()
        yield self._preempted()
        yield self._resumed()
        if self._partners is not None:
            return
        yield self._speculated()
        if self._loaded.proposer is not None:
            yield self._drafted(self._loaded.proposer)
        if spec.sparse_keep:
            yield self._sparse()
        if self._spec.kv_bits:
            yield self._dequantized()

    def _adapters_told_apart(self) -> Check:
        """Each adapter must be served, and say something with another certainty than the base."""
        adapters = adapters_of(self._loaded.model)
        infos = adapters.infos if adapters is not None else ()
        notes = [info.failure.message for info in infos if info.failure is not None]
        first = self._requests.index(self._adapted[0]) if self._adapted else 0
        outputs = self._alone[first : first + len(self._adapted)]
        base = _likelihoods(self._alone[0])
        for request, output in zip(self._adapted, outputs, strict=True):
            if request.sampling == self._requests[0].sampling and _likelihoods(output) == base:
                notes.append(f"the adapter {request.adapter!r} changes nothing")
        tokens = sum(len(output.ids) for output in outputs)
        return Check("adapters", len(self._adapted), tokens, note="; ".join(notes))

    def _told_apart(self) -> Check:
        """Of two pictures under the same text the model must not say the same with the same certainty."""
        first, second = self._alone[-len(self._pictured) :][:2]
        likelihoods = [[each.logprob for each in output.logprobs] for output in (first, second)]
        note = "another picture under the same text changes nothing" if likelihoods[0] == likelihoods[1] else ""
        return Check("two pictures", 2, len(first.ids) + len(second.ids), note=note)

    def _cached(self) -> Generator[Check]:
        if not self._loaded.plan.reuses_prefixes:
            yield Check("cache in memory", note=self._loaded.plan.reason, is_skipped=True)
            return
        warm = self._session(replace(self._spec, cache_bytes=CACHE_BYTES)).run([self._requests, self._requests])
        yield self._compare("cache in memory", warm, must_hit=True)
        if self._partners is None:
            yield self._disk()

    def _disk(self) -> Check:
        with tempfile.TemporaryDirectory(prefix="mlxd-verify-") as folder:
            spec = replace(self._spec, cache_bytes=CACHE_BYTES, disk_cache_dir=folder, disk_cache_bytes=DISK_BYTES)
            self._session(spec).run([self._requests])
            return self._compare("cache on disk", self._session(spec).run([self._requests]), must_hit=True)

    def _preempted(self) -> Check:
        if self._loaded.max_context < CROWD_PROMPT + CROWD_OUTPUT:
            return Check("preempted", note="the context is too short", is_skipped=True)
        crowd = _crowd(self._loaded.vocab_size)
        alone = self._session(self._spec)
        expected = alone.run([[request] for request in crowd])
        limit = alone.kv_cost.bytes(CROWD, CROWD_TOKENS) + 1
        session = self._session(replace(self._spec, kv_bytes=limit))
        outputs = session.run([crowd])
        if not session.gauges.preemptions:
            # Memory does not grow with the length, or all of it fits.
            return Check("preempted", note="no row ever had to make room", is_skipped=True)
        return _check("preempted", outputs, expected)

    def _resumed(self) -> Check:
        rng = random.Random(1)
        cuts = [rng.randrange(len(output.ids)) for output in self._alone]
        requests = [
            replace(request, resume=tuple(output.ids[:cut]))
            for request, output, cut in zip(self._requests, self._alone, cuts, strict=True)
        ]
        rest = self._session(self._spec).run([requests])
        for output, alone, cut in zip(rest, self._alone, cuts, strict=True):
            output.ids = alone.ids[:cut] + output.ids
        return self._compare("resumed", rest)

    def _speculated(self) -> Check:
        """With drafts of which some are right, so that rows keep different numbers of a block's tokens."""
        drafter = NoisyDrafts(self._loaded.vocab_size)
        for request, output in zip(self._requests, self._alone, strict=True):
            drafter.learn([*self._intake.row(request, 0.0).prompt, *output.ids])
        outputs = Session(self._loaded, self._intake, self._spec, drafter).run([self._requests])
        if not drafter.drafted:
            return Check("speculated", note="drafts cannot be verified in this lane", is_skipped=True)
        return self._compare("speculated", outputs)

    def _drafted(self, proposer: Proposer) -> Check:
        """With the drafts of the head, drafter or model that the worker has, at each step."""
        name = f"drafted by {proposer.source}"
        drafter = EagerDrafts(proposer, DRAFTED)
        outputs = Session(self._loaded, self._intake, self._spec, drafter).run([self._requests])
        if not drafter.drafted:
            return Check(name, note="it drafted nothing", is_skipped=True)
        return self._compare(name, outputs)

    def _dequantized(self) -> Check:
        """With quantized KV dequantized for each step, where steps read its codes: they stand for the same numbers."""
        with without_codes(self._loaded.model) as is_other:
            if is_other:
                return self._compare("dequantized", self._session(self._spec).run([self._requests]))
        return Check("dequantized", note="no step reads codes on this machine", is_skipped=True)

    def _sparse(self) -> Check:
        """Prompts of which a part is run, together and gone on with from some place, beside each alone."""
        if self._loaded.max_context < SPARSE_PROMPT + SPARSE_OUTPUT:
            return Check("sparse prefill", note="the context is too short", is_skipped=True)
        requests = _sparse_requests(self._loaded.vocab_size)
        alone = self._session(self._spec).run([[request] for request in requests])
        if failed := next((output.failure for output in alone if output.failure is not None), None):
            return Check("sparse prefill", len(requests), note=failed.message)
        cuts = [3 * at for at in range(len(requests))]
        resumed = [
            replace(request, resume=tuple(output.ids[:cut]))
            for request, output, cut in zip(requests, alone, cuts, strict=True)
        ]
        outputs = self._session(self._spec).run([resumed])
        for output, other, cut in zip(outputs, alone, cuts, strict=True):
            output.ids = other.ids[:cut] + output.ids
        return _check("sparse prefill", outputs, alone)

    def _session(self, spec: WorkerSpec) -> Session:
        return Session(self._loaded, self._intake, spec, partners=self._partners)

    def _compare(self, name: str, outputs: Sequence[Output], *, must_hit: bool = False) -> Check:
        check = _check(name, outputs, self._alone)
        if must_hit and not check.cached:
            return replace(check, note="nothing came from the cache")
        return check


def _check(name: str, outputs: Sequence[Output], expected: Sequence[Output]) -> Check:
    return Check(
        name,
        len(outputs),
        sum(len(output.ids) for output in outputs),
        sum(output.cached for output in outputs),
        tuple(_differences(outputs, expected)),
        drift=max(_drifts(outputs, expected), default=0.0),
    )


def _drifts(outputs: Sequence[Output], expected: Sequence[Output]) -> Generator[float]:
    """Deviation of each token's log-probability from its value alone, as long as the tokens agree.

    A resumed row has them only for what is new: those are compared from the end.
    """
    for output, other in zip(outputs, expected, strict=True):
        if output.ids == other.ids:
            pairs = zip(reversed(output.logprobs), reversed(other.logprobs), strict=False)
            yield from (abs(one.logprob - two.logprob) for one, two in pairs)


def _differences(outputs: Sequence[Output], expected: Sequence[Output]) -> Generator[Difference]:
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        if (output.ids, output.finish) == (other.ids, other.finish):
            continue
        pairs = zip(output.ids, other.ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(output.ids), len(other.ids)))
        top = other.logprobs[at].top if at < len(other.logprobs) else ()
        yield Difference(index, at, round(top[0][1] - top[1][1], 6) if len(top) > 1 else None)


def _requests(tokens: int, words: int, max_context: int) -> list[Generate]:
    """Greedy and seeded, short and long, half of them with a common beginning."""
    rng = random.Random(0)
    shared = math.ceil(SHARED_PART * words)
    common = rng.choices(WORDS, k=shared)
    requests: list[Generate] = []
    for part in PARTS:
        for is_sampled in (False, True):
            own = rng.choices(WORDS, k=min(math.ceil(part * words), max_context // 8))
            text = " ".join([*common, *own] if is_sampled and max_context > 8 * shared else own)
            sampling = Sampling(temperature=0.0, ignore_eos=True)
            if is_sampled:
                sampling = Sampling(temperature=0.8, top_p=0.95, seed=rng.getrandbits(62), ignore_eos=True)
            requests.append(Generate(len(requests) + 1, TextPrompt(text), sampling, max_tokens=tokens, top_logprobs=2))
    return requests


def _adapted(loaded: Loaded, requests: Sequence[Generate]) -> list[Generate]:
    """The first requests, greedy and sampled, of each adapter that is served."""
    adapters = adapters_of(loaded.model)
    names = [info.name for info in adapters.infos if info.failure is None] if adapters is not None else []
    pairs = [(name, request) for name in names for request in requests[:2]]
    first = len(requests) + 1
    return [replace(request, rid=first + at, adapter=name) for at, (name, request) in enumerate(pairs)]


def _likelihoods(output: Output) -> list[float]:
    return [each.logprob for each in output.logprobs]


def _pictured(rid: int, tokens: int) -> list[Generate]:
    """Pictures in messages: two under the same text, one of them with another question, and both at once."""
    first, second = picture(1), picture(2, 8, 4)
    made: list[Generate] = []
    for media, question in (((first,), 0), ((second,), 0), ((first,), 1), ((first, second), 2)):
        shown = [{"type": "image", "media": at} for at in range(len(media))]
        content = [*shown, {"type": "text", "text": " ".join(WORDS[question : question + 6])}]
        prompt = ChatPrompt([{"role": "user", "content": content}], media=media)
        is_sampled = len(made) % 2 == 1
        sampling = Sampling(temperature=0.8 if is_sampled else 0.0, top_p=0.95, seed=rid, ignore_eos=True)
        made.append(Generate(rid + len(made), prompt, sampling, max_tokens=tokens, top_logprobs=2))
    return made


def _sparse_requests(vocab_size: int) -> list[Generate]:
    """Prompts of which two blocks are left out."""
    rng = random.Random(2)
    return [
        Generate(
            rid,
            TokensPrompt(tuple(rng.randrange(vocab_size) for _ in range(SPARSE_PROMPT))),
            Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True),
            max_tokens=SPARSE_OUTPUT,
            top_logprobs=2,
            sparse_keep=SPARSE_KEEP,
        )
        for rid in range(1, SPARSE_ROWS + 1)
    ]


def _crowd(vocab_size: int) -> list[Generate]:
    requests: list[Generate] = []
    for rid in range(1, CROWD + 1):
        ids = tuple((20 + rid * 31 + at * 7) % vocab_size for at in range(CROWD_PROMPT + CROWD_GIVEN))
        requests.append(
            Generate(
                rid,
                TokensPrompt(ids[:CROWD_PROMPT]),
                Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True),
                max_tokens=CROWD_OUTPUT,
                top_logprobs=2,
                resume=ids[CROWD_PROMPT:],
            )
        )
    return requests


def _checks(spec: WorkerSpec, tokens: int, words: int) -> Generator[Check]:
    """Those of the model's kind. Raises `LoadFailed`, `RequestInvalid`, and `PartnerLost`."""
    kind = kind_of_spec(spec)
    if kind == AUDIO:
        # It loads mlx-audio, which may not be installed.
        from worker.verify_audio import audio_checks, load_silently

        yield from audio_checks(load_silently(spec))
        return
    if kind != TEXT:
        yield from reader_checks(load_reader(spec, kind, lambda _stage, _done, _total: None))
        return
    lead, division = open_group(spec, _lost) if spec.group is not None else (None, None)
    loaded = load_checked(spec, lambda _stage, _done, _total: None, division, lead)
    share = memory.Share(spec, loaded.weights_bytes)
    share.enforce(share.limits())
    yield from Verifier(loaded, spec, tokens, words, lead).checks()
    if lead is not None:
        lead.leave()


def _lost(failure: Failure, status: int) -> None:
    """End the process, whose main thread may wait for another rank forever."""
    print(failure.message, file=sys.stderr, flush=True)
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Verify one model; returns the exit status."""
    parser = argparse.ArgumentParser(prog="worker.verify", description="Compare what a model says however it is run.")
    parser.add_argument("--spec", required=True, help="a WorkerSpec as JSON; - reads it from standard input")
    parser.add_argument("--tokens", type=int, default=48, help="generated for each request")
    parser.add_argument("--words", type=int, default=LONGEST_WORDS, help="of the longest prompt")
    options = parser.parse_args(argv)
    try:
        spec = read_spec(options.spec)
    except msgspec.DecodeError as error:
        print(f"bad --spec: {error}", file=sys.stderr)
        return Exit.BAD_CONFIG
    try:
        status = 0
        for check in _checks(spec, options.tokens, options.words):
            print(msgspec.json.encode(check).decode(), flush=True)
            if not check.is_good:
                status = DIFFERENT
    except LoadFailed as error:
        print(error.failure.message, file=sys.stderr)
        return error.exit_status
    except PartnerLost as error:
        print(error.failure.message, file=sys.stderr)
        return Exit.PARTNER_LOST
    except RequestInvalid as error:
        print(f"the model cannot take the requests of this test: {error.failure.message}", file=sys.stderr)
        return Exit.MODEL_UNUSABLE
    return status


if __name__ == "__main__":
    sys.exit(main())
