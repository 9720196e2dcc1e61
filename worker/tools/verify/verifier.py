"""Verifier of one model: compares each way of running a request with the same request run alone.

mlx-lm's own numbers for a paragraph of plain English, beside which the engine's numbers are put.

Session of one engine on the calling thread, and the output of each of its requests.

Comparison of outputs with the outputs of the same requests run alone.

Drafters that ignore whether drafts are worth their time. They serve to check that drafts change no token.

Requests of a verification: short and long, greedy and sampled, with pictures, and with adapters.
"""

import gc
import hashlib
import io
import math
import random
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load
from msgspec.structs import replace
from PIL import Image

from protocol.failures import Failure
from protocol.from_worker import Delta, Finish, Rejected, Step, TokenLogprob, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import ChatPrompt, Generate, Media, Sampling, Shutdown, TextPrompt, TokensPrompt
from protocol.verify_output import Difference, VerifyCheck
from worker.engine.gauges import Gauges
from worker.engine.inbox import EngineInbox
from worker.engine.load_checks import without_codes
from worker.engine.loop import Engine
from worker.engine.rank_peers import RankPeers
from worker.engine.scheduling.kv_budget import KvCost
from worker.errors import LoadFailed, foreign_code
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.loader import LoadedModel, cast, explain, folded_config, read_config, resolve
from worker.model.lora.adapters import adapters_of
from worker.prompt.intake import Intake
from worker.prompt.limits_and_truncation import SparseLimits
from worker.sparse_prefill import BLOCK_TOKENS
from worker.speculation.draft_state import DraftedRow, DraftedText, Drafting
from worker.speculation.drafter import Drafter, Draw, Proposer, Rows
from worker.speculation.text_sources import Tokens

PARAGRAPH: Final = (
    "The lighthouse keeper rose before dawn and climbed the stairs with a can of oil in each hand. For thirty years he "
    "had counted the steps, although he knew that there were one hundred and twelve of them. At the top he trimmed the "
    "wick, wiped the salt from the glass, and looked out over the water. A fishing boat was coming home along the "
    "coast, low in the waves, with gulls behind it. He lifted his arm, and somebody on the deck waved back. Then the "
    "sun came up, the lamp was no longer needed, and he went down to the kitchen to make coffee. His daughter had left "
    "a letter on the table. She wrote that the new light would work without a keeper, that a machine would turn it on "
    "and off, and that he could come to live with her in the city whenever he liked. He read it twice, folded it, and "
    "put it into the drawer with the others."
)


@dataclass(frozen=True, slots=True)
class MlxLmReference:
    """Token ids of the paragraph and its perplexity, by mlx-lm. Without a perplexity there is a `reason`.

    mlx-lm's classes ignore some keys of config.json, such as a rotary embedding in the form of another version. If mlxd
    adds keys for them, there is a second perplexity, of a model that mlx-lm loads with these keys.
    """

    ids: tuple[int, ...] = ()
    alone: float | None = None
    with_keys: float | None = None
    reason: str = ""

    def nearest(self, ours: float) -> tuple[float, str]:
        """Return the perplexity that is nearest to `ours`, and whose it is."""
        assert self.alone is not None
        if self.with_keys is not None and _ratio(ours, self.with_keys) < _ratio(ours, self.alone):
            return self.with_keys, "mlx-lm with config.json as mlxd reads it"
        return self.alone, "mlx-lm alone"


def reference_of(spec: WorkerSpec) -> MlxLmReference:
    """Load a model by mlx-lm alone, with the numbers' type of `spec`, run one forward pass, and free the model."""
    try:
        path = resolve(spec.path)
        config = read_config(path)
        folded = folded_config(config)
        with foreign_code(lambda error: explain(path, config, error)):
            with checkpoint_view(path, {}) as view:
                ids, alone = _reference(view, spec)
            if folded == config:
                return MlxLmReference(ids, alone)
            with checkpoint_view(path, {CONFIG: folded}) as view:
                return MlxLmReference(ids, alone, _reference(view, spec)[1])
    except LoadFailed as error:
        return MlxLmReference(reason=f"mlx-lm does not run it: {error.failure.message}")


def _reference(path: Path, spec: WorkerSpec) -> tuple[tuple[int, ...], float]:
    """Return the ids of the paragraph and its perplexity. The model is freed."""
    try:
        settings = {"trust_remote_code": spec.trust_remote_code}
        model, tokenizer = load(str(path), tokenizer_config=settings, trust_remote_code=spec.trust_remote_code)[:2]
        cast(model, spec.dtype)
        ids = [int(token) for token in tokenizer.encode(PARAGRAPH)]
        return tuple(ids), perplexity(_logprobs(model, ids))
    finally:
        model = tokenizer = None
        gc.collect()
        mx.clear_cache()


def _ratio(one: float, other: float) -> float:
    return max(one / other, other / one)


def perplexity(logprobs: Sequence[float]) -> float:
    """Return e to the mean negative log-probability of the tokens."""
    return math.exp(-sum(logprobs) / len(logprobs))


def _logprobs(model: Any, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first."""
    logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
    chosen = mx.take_along_axis(logits, mx.array(ids[1:])[:, None], axis=-1)[:, 0]
    logprobs: Any = (chosen - mx.logsumexp(logits, axis=-1)).tolist()
    return [float(each) for each in logprobs]


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

    def receive(self, delta: Delta) -> None:
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
                    self._outputs[delta.rid].receive(delta)
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


def compare(name: str, outputs: Sequence[VerifiedOutput], expected: Sequence[VerifiedOutput]) -> VerifyCheck:
    """Compare each token of the outputs with the expected outputs."""
    return VerifyCheck(
        name,
        len(outputs),
        sum(len(output.ids) for output in outputs),
        sum(output.cached for output in outputs),
        tuple(_differences(outputs, expected)),
        drift=max(_drifts(outputs, expected), default=0.0),
    )


def _drifts(outputs: Sequence[VerifiedOutput], expected: Sequence[VerifiedOutput]) -> Generator[float]:
    """Yield the deviation of each token's log-probability from its value when run alone, for equal outputs.

    A resumed row has log-probabilities only for its new tokens, so values are compared from the end.
    """
    for output, other in zip(outputs, expected, strict=True):
        if output.ids == other.ids:
            pairs = zip(reversed(output.logprobs), reversed(other.logprobs), strict=False)
            yield from (abs(one.logprob - two.logprob) for one, two in pairs)


def _differences(outputs: Sequence[VerifiedOutput], expected: Sequence[VerifiedOutput]) -> Generator[Difference]:
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        if (output.ids, output.finish) == (other.ids, other.finish):
            continue
        at = first_difference(output.ids, other.ids)
        top = other.logprobs[at].top if at < len(other.logprobs) else ()
        yield Difference(index, at, round(top[0][1] - top[1][1], 6) if len(top) > 1 else None)


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the index of the first different item, or the length of the shorter sequence."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def likelihoods(output: VerifiedOutput) -> list[float]:
    return [each.logprob for each in output.logprobs]


# Share of the tokens drafted by `NoisyDrafts` that are right.
_RIGHT_SHARE: Final = 0.8


class _TrialDrafts(Drafter):
    """Base class that counts drafted and accepted tokens, because a check without drafts proves nothing."""

    def __init__(self, longest: int) -> None:
        self.widest = longest + 1
        self.drafted = 0
        self.accepted = 0

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        row.draft.followed = DraftedText.of(tokens, drafting)

    def discard(self, row: DraftedRow) -> None:
        row.draft.followed = None

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        if row.draft.followed is not None:
            row.draft.followed.lookup.extend(tokens)

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        self.drafted += sum(map(len, drafts))
        self.accepted += sum(accepted)


class EagerDrafts(_TrialDrafts):
    """Drafter that requests `count` tokens from a proposer at each step."""

    def __init__(self, proposer: Proposer, count: int) -> None:
        super().__init__(count)
        self._proposer = proposer
        self._count = count

    @property
    def unread(self) -> int:
        return self._proposer.unread

    def read(self, count: int) -> int:
        return self._proposer.read(count)

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._proposer.begin(draw, rows)

    def discard(self, row: DraftedRow) -> None:
        super().discard(row)
        self._proposer.discard(row)

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return True

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        asked = [at for at, limit in enumerate(most) if limit > 0]
        texts = [row.draft.followed.lookup.text for row in (rows[at] for at in asked) if row.draft.followed is not None]
        drafts = self._proposer.propose([rows[at] for at in asked], texts, [newest[at] for at in asked], self._count)
        drafted = dict(zip(asked, drafts, strict=True))
        return [drafted.get(at, [])[:limit] for at, limit in enumerate(most)]


class NoisyDrafts(_TrialDrafts):
    """Drafter that takes drafts of varying length from the rows' known outputs, and replaces some tokens by random
    ones."""

    def __init__(self, vocab_size: int, longest: int = 6, seed: int = 0) -> None:
        super().__init__(longest)
        self._texts: list[list[int]] = []
        self._vocab_size = vocab_size
        self._longest = longest
        self._rng = random.Random(seed)

    def learn(self, text: Sequence[int]) -> None:
        """Add a whole sequence of prompt and output."""
        self._texts.append(list(text))

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return bool(self._texts) and self._rng.random() < _RIGHT_SHARE

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        texts = [row.draft.followed.lookup.text.tolist() for row in rows if row.draft.followed is not None]
        return [self._draft([*text, token], limit) for text, token, limit in zip(texts, newest, most, strict=True)]

    def _draft(self, known: list[int], most: int) -> list[int]:
        length = min(most, self._rng.choice([0, 1, self._longest])) if self._texts else 0
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        right = text[len(known) : len(known) + length]
        draft = right + [self._rng.randrange(self._vocab_size) for _ in range(length - len(right))]
        return [
            token if self._rng.random() < _RIGHT_SHARE else self._rng.randrange(self._vocab_size) for token in draft
        ]


PARTS: Final = (0.02, 0.15, 0.5, 1.0)
SHARED_PART: Final = 0.375
# Number of rows in the crowd. They outgrow the estimate of admission, so that one row is preempted if memory is short.
CROWD: Final = 3
# Number of prompt tokens of each row.
CROWD_PROMPT: Final = 240
# Number of output tokens that are given, so that the generated tokens cross the limit.
CROWD_GIVEN: Final = 250
CROWD_OUTPUT: Final = 290
# Number of sparse prompts, each of which keeps eight of its ten blocks.
SPARSE_ROWS: Final = 3
SPARSE_PROMPT: Final = 10 * BLOCK_TOKENS
SPARSE_KEEP: Final = 0.8
SPARSE_OUTPUT: Final = 12
# Number of pixels per side of a square in a picture.
SQUARE_PIXELS: Final = 24
WORDS: Final = (
    "time", "people", "water", "light", "house", "river", "stone", "music", "paper", "green", "small", "early", "under",
    "after", "between", "never", "always", "because",
)  # fmt: skip


def text_requests(tokens: int, words: int, max_context: int) -> list[Generate]:
    """Return greedy and seeded requests, short and long, half of them with a common beginning."""
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


def adapter_requests(loaded: LoadedModel, requests: Sequence[Generate]) -> list[Generate]:
    """Return the first two requests, greedy and sampled, for each adapter that is served."""
    adapters = adapters_of(loaded.model)
    names = [info.name for info in adapters.infos if info.failure is None] if adapters is not None else []
    pairs = [(name, request) for name in names for request in requests[:2]]
    first = len(requests) + 1
    return [replace(request, rid=first + at, adapter=name) for at, (name, request) in enumerate(pairs)]


def picture_requests(rid: int, tokens: int) -> list[Generate]:
    """Return four requests with pictures: two pictures with the same text, the first picture with another text, and
    both pictures in one message."""
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


def sparse_requests(vocab_size: int) -> list[Generate]:
    """Return prompts of which sparse prefill skips two blocks."""
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(SPARSE_PROMPT)) for _ in range(SPARSE_ROWS)]
    return [
        replace(_request(rid, prompt, SPARSE_OUTPUT), sparse_keep=SPARSE_KEEP) for rid, prompt in enumerate(prompts, 1)
    ]


def crowd_requests(vocab_size: int) -> list[Generate]:
    """Return rows of which one must be preempted if memory is short."""
    requests: list[Generate] = []
    for rid in range(1, CROWD + 1):
        ids = tuple((20 + rid * 31 + at * 7) % vocab_size for at in range(CROWD_PROMPT + CROWD_GIVEN))
        request = _request(rid, ids[:CROWD_PROMPT], CROWD_OUTPUT)
        requests.append(replace(request, resume=ids[CROWD_PROMPT:]))
    return requests


def _request(rid: int, prompt: tuple[int, ...], max_tokens: int) -> Generate:
    sampling = Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True)
    return Generate(rid, TokensPrompt(prompt), sampling, max_tokens=max_tokens, top_logprobs=2)


def picture(seed: int, wide: int = 6, high: int = 6) -> Media:
    """Return a PNG of `wide` × `high` coloured squares."""
    squares = Image.frombytes("RGB", (wide, high), random.Random(seed).randbytes(3 * wide * high))
    stream = io.BytesIO()
    squares.resize((wide * SQUARE_PIXELS, high * SQUARE_PIXELS), Image.Resampling.NEAREST).save(stream, "PNG")
    data = stream.getvalue()
    return Media("image", hashlib.blake2b(data, digest_size=32).digest(), data)


# Number of words of the longest prompt. The others are parts of it; every other request begins with a shared text.
LONGEST_WORDS: Final = 160
SMALL_CHUNK: Final = 32
# Number of tokens requested per draft.
DRAFT_TOKENS: Final = 3
CACHE_BYTES: Final = 1 << 30
DISK_BYTES: Final = 4 << 30
CROWD_TOKENS: Final = 512
# Prompt tokens of the requests whose first token is timed, at most half of the context.
TIMED_TOKENS: Final = 512
# Largest ratio of a perplexity to mlx-lm's: kernels round by the shape of a pass, in 16 bits more than in 32. KV of 4
# bits changes a perplexity by as much as the model lets it, so it has no limit.
PERPLEXITY_RATIOS: Final = {"float32": 1.001, "other": 1.02, "kv_bits = 8": 1.03, "kv_bits = 4": math.inf}


class Verifier:
    """All checks of one model. The first check runs each request alone and without caches; all other checks must give
    the same outputs.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: WorkerSpec,
        tokens: int,
        words: int = LONGEST_WORDS,
        rank_peers: RankPeers | None = None,
        reference: MlxLmReference | None = None,
    ) -> None:
        self._rank_peers = rank_peers
        self._reference = reference
        self._loaded = loaded
        self._intake = Intake(loaded, spec.parser, sparse=SparseLimits(spec.sparse_keep))
        # Caches are off, unless a check needs them.
        self._spec = replace(
            spec, cache_bytes=0, disk_cache_dir="", disk_cache_bytes=0, max_running=16, speculate="off"
        )
        self._requests = text_requests(tokens, words, loaded.max_context)
        # Requests for each adapter, greedy and sampled, with the texts of the first requests.
        self._adapted = adapter_requests(loaded, self._requests)
        self._requests += self._adapted
        # Requests with pictures; the first two have different pictures with the same text.
        self._pictured: list[Generate] = []
        if "image" in self._intake.media.modalities:
            self._pictured = picture_requests(len(self._requests) + 1, tokens)
            self._requests += self._pictured
        self._alone: list[VerifiedOutput] = []

    def checks(self) -> Generator[VerifyCheck]:
        requests, spec = self._requests, self._spec
        self._alone = self._session(spec).run([[request] for request in requests])
        if failed := next((output.failure for output in self._alone if output.failure is not None), None):
            yield VerifyCheck("alone", len(requests), note=failed.message)
            return
        yield self._compare("alone", self._alone)
        if self._reference is not None:
            yield self._perplexity(self._reference)
        if self._rank_peers is None:
            yield self._first_token()
        if self._spec.adapters:
            yield self._check_adapters()
        if self._pictured:
            yield self._check_pictures()
        yield self._compare("batched", self._session(spec).run([requests]))
        small = replace(spec, prefill_chunk=SMALL_CHUNK)
        yield self._compare(f"chunks of {SMALL_CHUNK}", self._session(small).run([requests]))
        yield from self._cached()
        yield self._preempted()
        yield self._resumed()
        if self._rank_peers is not None:
            return
        yield self._speculated()
        if self._loaded.proposer is not None:
            yield self._drafted(self._loaded.proposer)
        if spec.sparse_keep:
            yield self._sparse()
        if self._spec.kv_bits:
            yield self._dequantized()

    def _perplexity(self, reference: MlxLmReference) -> VerifyCheck:
        """Compare the perplexity of a paragraph, served by the engine, with that of mlx-lm's own forward pass."""
        if reference.alone is None:
            return VerifyCheck("perplexity", note=reference.reason, is_skipped=True)
        if not 1 < len(reference.ids) < self._loaded.max_context:
            return VerifyCheck("perplexity", note="the context is too short", is_skipped=True)
        request = Generate(1, TokensPrompt(reference.ids), Sampling(temperature=0.0), max_tokens=1, prompt_logprobs=0)
        output = self._session(self._spec).run([[request]])[0]
        if output.failure is not None:
            return VerifyCheck("perplexity", 1, note=output.failure.message)
        ours = perplexity(output.prompt_logprobs)
        theirs, source = reference.nearest(ours)
        kind = f"kv_bits = {self._spec.kv_bits}" if self._spec.kv_bits else "float32" if self._is_float32 else "other"
        return VerifyCheck(
            "perplexity",
            requests=1,
            tokens=len(reference.ids),
            measured=f"{ours:.3f}, {theirs:.3f} by {source}",
            is_wrong=not _ratio(ours, theirs) <= PERPLEXITY_RATIOS[kind],  # also if it is NaN
        )

    @property
    def _is_float32(self) -> bool:
        arrays: Any = tree_flatten(self._loaded.model.parameters())
        return all(array.dtype == mx.float32 for _, array in arrays)

    def _first_token(self) -> VerifyCheck:
        """Measure the time to the first token of a new prompt, and of the same prompt again."""
        rng = random.Random(2)
        count = min(TIMED_TOKENS, self._loaded.max_context // 2)
        first, timed = (tuple(rng.choices(range(self._loaded.vocab_size), k=count)) for _ in range(2))
        requests = [
            Generate(rid, TokensPrompt(ids), Sampling(temperature=0.0, ignore_eos=True), max_tokens=2)
            for rid, ids in enumerate((first, timed, timed), 1)  # the first one compiles kernels
        ]
        outputs = self._session(replace(self._spec, cache_bytes=CACHE_BYTES)).run([[each] for each in requests])
        if failed := next((output.failure for output in outputs if output.failure is not None), None):
            return VerifyCheck("first token", len(requests), note=failed.message)
        _, cold, warm = outputs
        return VerifyCheck(
            "first token",
            requests=len(requests),
            tokens=sum(len(output.ids) for output in outputs),
            cached=warm.cached,
            measured=f"{cold.first_token_s:.2f} s after {count} new tokens, {warm.first_token_s:.2f} s again",
        )

    def _check_adapters(self) -> VerifyCheck:
        """Check that each adapter is served, and changes the likelihoods of the base model."""
        adapters = adapters_of(self._loaded.model)
        infos = adapters.infos if adapters is not None else ()
        notes = [info.failure.message for info in infos if info.failure is not None]
        first = self._requests.index(self._adapted[0]) if self._adapted else 0
        outputs = self._alone[first : first + len(self._adapted)]
        base = likelihoods(self._alone[0])
        for request, output in zip(self._adapted, outputs, strict=True):
            if request.sampling == self._requests[0].sampling and likelihoods(output) == base:
                notes.append(f"the adapter {request.adapter!r} changes nothing")
        tokens = sum(len(output.ids) for output in outputs)
        return VerifyCheck("adapters", len(self._adapted), tokens, note="; ".join(notes))

    def _check_pictures(self) -> VerifyCheck:
        """Check that two pictures with the same text give different likelihoods."""
        first, second = self._alone[-len(self._pictured) :][:2]
        is_equal = likelihoods(first) == likelihoods(second)
        note = "another picture under the same text changes nothing" if is_equal else ""
        return VerifyCheck("two pictures", 2, len(first.ids) + len(second.ids), note=note)

    def _cached(self) -> Generator[VerifyCheck]:
        if not self._loaded.plan.reuses_prefixes:
            yield VerifyCheck("cache in memory", note=self._loaded.plan.reason, is_skipped=True)
            return
        warm = self._session(replace(self._spec, cache_bytes=CACHE_BYTES)).run([self._requests, self._requests])
        yield self._compare("cache in memory", warm, must_hit=True)
        if self._rank_peers is None:
            yield self._disk()

    def _disk(self) -> VerifyCheck:
        with tempfile.TemporaryDirectory(prefix="mlxd-verify-") as folder:
            # The requests are shorter than prefixes that a worker writes: here every prefix is written.
            spec = replace(
                self._spec,
                cache_bytes=CACHE_BYTES,
                disk_cache_dir=folder,
                disk_cache_bytes=DISK_BYTES,
                disk_cache_tokens=0,
            )
            self._session(spec).run([self._requests])
            return self._compare("cache on disk", self._session(spec).run([self._requests]), must_hit=True)

    def _preempted(self) -> VerifyCheck:
        if self._loaded.max_context < CROWD_PROMPT + CROWD_OUTPUT:
            return VerifyCheck("preempted", note="the context is too short", is_skipped=True)
        crowd = crowd_requests(self._loaded.vocab_size)
        alone = self._session(self._spec)
        expected = alone.run([[request] for request in crowd])
        limit = alone.kv_cost.bytes(CROWD, CROWD_TOKENS) + 1
        session = self._session(replace(self._spec, kv_bytes=limit))
        outputs = session.run([crowd])
        if not session.gauges.preemptions:
            # No row is preempted if memory does not grow with the length, or if all rows fit.
            return VerifyCheck("preempted", note="no row ever had to make room", is_skipped=True)
        return compare("preempted", outputs, expected)

    def _resumed(self) -> VerifyCheck:
        rng = random.Random(1)
        cuts = [rng.randrange(len(output.ids)) for output in self._alone]
        return self._compare("resumed", self._run_rest(self._requests, self._alone, cuts))

    def _run_rest(
        self, requests: Sequence[Generate], alone: Sequence[VerifiedOutput], cuts: Sequence[int]
    ) -> list[VerifiedOutput]:
        """Resume each request after its first `cuts[i]` tokens; return outputs that include these tokens."""
        resumed = [
            replace(request, resume=tuple(output.ids[:cut]))
            for request, output, cut in zip(requests, alone, cuts, strict=True)
        ]
        outputs = self._session(self._spec).run([resumed])
        for output, whole, cut in zip(outputs, alone, cuts, strict=True):
            output.ids = whole.ids[:cut] + output.ids
        return outputs

    def _speculated(self) -> VerifyCheck:
        """Check drafts that are partly right, so that rows accept different numbers of a block's tokens."""
        drafter = NoisyDrafts(self._loaded.vocab_size)
        for request, output in zip(self._requests, self._alone, strict=True):
            drafter.learn([*self._intake.row(request, 0.0).prompt, *output.ids])
        outputs = self._session(self._spec, drafter).run([self._requests])
        if not drafter.drafted:
            return VerifyCheck("speculated", note="drafts cannot be verified in this batch mode", is_skipped=True)
        return self._compare("speculated", outputs)

    def _drafted(self, proposer: Proposer) -> VerifyCheck:
        """Check the drafts of the worker's own head, drafter or draft model, at each step."""
        name = f"drafted by {proposer.source}"
        drafter = EagerDrafts(proposer, DRAFT_TOKENS)
        outputs = self._session(self._spec, drafter).run([self._requests])
        if not drafter.drafted:
            return VerifyCheck(name, note="it drafted nothing", is_skipped=True)
        return self._compare(name, outputs)

    def _dequantized(self) -> VerifyCheck:
        """Check quantized KV that is dequantized for each step, if steps normally read its codes: both must give equal
        outputs.
        """
        with without_codes(self._loaded.model) as is_other:
            if is_other:
                return self._compare("dequantized", self._session(self._spec).run([self._requests]))
        return VerifyCheck("dequantized", note="no step reads codes on this machine", is_skipped=True)

    def _sparse(self) -> VerifyCheck:
        """Compare sparse prompts that run together, or are resumed, with each prompt run alone."""
        if self._loaded.max_context < SPARSE_PROMPT + SPARSE_OUTPUT:
            return VerifyCheck("sparse prefill", note="the context is too short", is_skipped=True)
        requests = sparse_requests(self._loaded.vocab_size)
        alone = self._session(self._spec).run([[request] for request in requests])
        if failed := next((output.failure for output in alone if output.failure is not None), None):
            return VerifyCheck("sparse prefill", len(requests), note=failed.message)
        cuts = [3 * at for at in range(len(requests))]
        return compare("sparse prefill", self._run_rest(requests, alone, cuts), alone)

    def _session(self, spec: WorkerSpec, drafter: Drafter | None = None) -> EngineSession:
        return EngineSession(self._loaded, self._intake, spec, drafter, self._rank_peers)

    def _compare(self, name: str, outputs: Sequence[VerifiedOutput], *, must_hit: bool = False) -> VerifyCheck:
        check = compare(name, outputs, self._alone)
        if must_hit and not check.cached:
            return replace(check, note="nothing came from the cache")
        return check
