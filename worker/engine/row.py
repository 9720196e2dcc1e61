"""Row: one sequence on its way through the worker, from the intake to its end.

While a row is in the batch it has a `BatchSequence`, which holds the state of all parts of the batch for it.

Questions of a row: each is asked alone behind the row's prompt, and answered by the log-probabilities of its labels.

An answer must not depend on the other questions or on other rows. So a row with questions is computed alone, in forward
passes whose lengths depend on its own tokens only: the prompt in slices that end at fixed positions, then the tokens of
one question after another, each on the prompt's KV alone.
"""

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import TokenBuffer

from protocol.from_worker import TokenLogprob, Usage
from protocol.group import RowQuestion
from protocol.to_worker import ChatPrompt, Generate, Sampling
from worker.model.lora.adapters import Adapter
from worker.output.detokenize import Detokenizer, Vocabulary
from worker.output.parsers.parser import Parser
from worker.output.stops import StopScanner, marks_of
from worker.prefix_cache.cache_and_eviction import CacheLookup, Ticket
from worker.sampling.logprobs import Scores, scored_top
from worker.sampling.penalties import NO_WORDS, BadWords
from worker.sampling.sampler import Draws, Guard
from worker.sparse_prefill import SelectedTokens, count_kept
from worker.speculation.draft_state import DraftedCounts, Drafting, DraftState
from worker.structured.masks import MaskWork
from worker.structured.row_constraint import Rule
from worker.vision.media import Span, before_media, media_keys
from worker.vision.multimodal_merge import MediaPlacement

SLICE_TOKENS: Final = 128

Path = tuple[int, ...]
"""Tokens that several labels of a question begin with."""


@dataclass(slots=True, eq=False)
class RowQuestions:
    """Questions of a row that are not answered yet, and the answers so far: the log-probability of each label.

    `slices` are the ends of the slices of the prompt. The prompt's last token is in none of them, because it runs with
    each question. `layout` is a digest of the places of the prompt's media, on which the slices depend.
    """

    left: list[RowQuestion]
    slices: Sequence[int]
    layout: str = ""
    answers: list[list[float]] = field(default_factory=list[list[float]])
    tokens: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = [len(question.tokens) for question in self.left]
        deepest = [max(map(len, question.labels)) for question in self.left if question.tokens]
        self.tokens = sum(lengths)
        self.longest = max(lengths, default=0) + max(deepest, default=0)

    def skip_unasked(self) -> None:
        """Answer the next questions that have no tokens, because they do not fit the context, with NaN."""
        while self.left and not self.left[0].tokens:
            self.answer([math.nan] * len(self.left[0].labels))

    def answer(self, logprobs: list[float]) -> None:
        """Answer the next question."""
        del self.left[0]
        self.answers.append(logprobs)

    def whole(self, at: int) -> int:
        """Return the last position up to `at` where a slice ends."""
        ended = bisect_right(self.slices, at)
        return self.slices[ended - 1] if ended else 0

    def segments(self, tokens: Sequence[int], reused: int) -> tuple[list[list[int]], frozenset[int]]:
        """Return the prompt's tokens after the first `reused` in slices, and the position of the checkpoint: the end of
        the last slice that a longer prompt has too."""
        last = len(tokens) - 1
        cuts = [reused, *(end for end in self.slices if end > reused), last, len(tokens)]
        return [list(tokens[at:end]) for at, end in pairwise(cuts) if at < end], frozenset(self.slices[-1:])


def slice_ends(tokens: int, media: Sequence[Span]) -> list[int]:
    """Return the ends of the slices of a prompt of this many tokens that a longer prompt has too. A slice has
    `SLICE_TOKENS` tokens of text, or one span of media, or it ends where the next span begins."""
    spans = {span.begin: span.end for span in media}
    begins = sorted(spans)
    ends: list[int] = []
    at = 0
    while True:
        following = begins[bisect_right(begins, at) :][:1]
        at = spans.get(at) or min(at + SLICE_TOKENS, *following, at + SLICE_TOKENS)
        if at >= tokens:
            return ends
        ends.append(at)


def inner_paths(labels: Sequence[Sequence[int]]) -> list[Path]:
    """Return the beginnings of labels that have more tokens, in a fixed order."""
    return sorted({tuple(label[:at]) for label in labels for at in range(1, len(label))})


def next_tokens(labels: Sequence[Sequence[int]], path: Path) -> list[int]:
    """Return the tokens that follow `path` in some label, in a fixed order."""
    depth = len(path)
    return sorted({label[depth] for label in labels if len(label) > depth and tuple(label[:depth]) == path})


@dataclass(slots=True)
class HeldToken:
    """Sampled token whose text is not safe to send yet.

    The token's text begins at character `begin`. `safe` is the number of characters that were safe from stop strings
    once the token was added. `is_sent` is set if the client of a resumed row already has the token.
    """

    begin: int
    id: int
    logprob: TokenLogprob | None = None
    safe: int = 0
    is_sent: bool = False


@dataclass(slots=True, eq=False)
class RowText:
    """Output text of a row, owned by the writer. Tokens are `held` while none of their text is safe to send, then
    `unsent` until a delta contains their ids.

    Five fields count characters: `seen` were generated, `safe` cannot become part of a stop string, `ready` may be sent
    with the released tokens, `sent` were sent, and `resumed` are those that the client of a resumed row already has.
    `pending` is safe text that was not sent.
    """

    detokenizer: Detokenizer
    stops: StopScanner
    includes_stop: bool = False
    # Marks of the special tokens without text that stop strings name, by id, and the number of marks so far. All counts
    # of characters include marks.
    marks: dict[int, str] = field(default_factory=dict[int, str])
    marked: int = 0
    parser: Parser | None = None
    # Whether the output ends with its first tool call.
    is_one_call: bool = False
    held: deque[HeldToken] = field(default_factory=deque[HeldToken])
    unsent: list[int] = field(default_factory=list[int])
    seen: int = 0
    safe: int = 0
    ready: int = 0
    sent: int = 0
    pending: str = ""
    resumed: int = 0

    @classmethod
    def of(cls, request: Generate, prompt: Sequence[int], vocabulary: Vocabulary) -> Self:
        """Return the text of a request's output behind its prompt. No stop string cuts a call that is required."""
        is_call = isinstance(request.prompt, ChatPrompt) and request.prompt.must_call
        stops = () if is_call else request.stop
        marks = marks_of(stops, vocabulary.hidden_names)
        return cls(
            vocabulary.detokenizer(prompt),
            StopScanner(stops, marks, is_inclusive=request.includes_stop),
            includes_stop=request.includes_stop,
            marks={vocabulary.hidden_names[name]: mark for name, mark in marks.items()},
            is_one_call=isinstance(request.prompt, ChatPrompt) and request.prompt.one_call,
        )


@dataclass(slots=True, eq=False)
class Thinking:
    """State of a row's reasoning. `tokens` counts its tokens, and `closing_ids` end it once `budget` is used up."""

    is_open: bool = False
    tokens: int = 0
    budget: int | None = None
    closing_ids: tuple[int, ...] = ()

    @property
    def is_enough(self) -> bool:
        return self.budget is not None and self.is_open and self.tokens >= self.budget


@dataclass(slots=True, eq=False)
class PromptReport:
    """Parts of the prompt that are sent before the answer: its text, ids and log-probabilities."""

    echo: str = ""
    sends_ids: bool = False
    # Number of top tokens to score per position of the prompt; None if the prompt is not scored, or was scored already.
    scored_top: int | None = None
    # Number of top tokens per `PromptLogprob`; None if the prompt's log-probabilities are sent only in the echo, or not
    # at all.
    logprobs: int | None = None
    scores_sent: int = 0
    # Number of entries of the echo that were sent; the first of them has the prompt's text.
    echo_sent: int = 0

    @classmethod
    def of(cls, request: Generate, ids: Sequence[int], text: str | None, vocabulary: Vocabulary) -> Self:
        """Return the report of a request's prompt; `text` is None for a prompt of ids."""
        echo = (text if text is not None else vocabulary.decode(ids)) if request.echo else ""
        return cls(
            echo,
            request.prompt_ids,
            scored_top(request, len(ids)),
            request.prompt_logprobs,
            request.prompt_scored,
            request.echo_scored,
        )


@dataclass(slots=True, eq=False)
class RowStats:
    """Timestamps of a row, by the monotonic clock, and its counts of tokens."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    # Number of prompt tokens that the prefix cache had at the row's first insertion; at later insertions, the cache may
    # also have KV of the row itself.
    cached: int | None = None
    completion: int = 0
    # Number of tokens of the client's prediction that were drafted.
    predicted: int = 0
    # Number of tokens of the client's prediction that were accepted.
    accepted: int = 0
    # Numbers of all drafted tokens, and of those that were accepted.
    drafted: int = 0
    drafts_accepted: int = 0
    # Result of the first lookup in the prefix cache; None before it.
    lookup: CacheLookup | None = None
    preemptions: int = 0
    grammar_waits: int = 0
    # Time outside of the batch after the first insertion, in seconds, and the beginning of the current pause or 0.
    paused_s: float = 0.0
    paused_at: float = 0.0
    # Time in which the loop rested until the row arrived and, once it has ended, while it was there, in seconds.
    rested_s: float = 0.0

    def preempt(self) -> None:
        """Note that the row has left the batch for older ones."""
        self.preemptions += 1
        self.paused_at = time.monotonic()

    def wait_for_grammar(self) -> None:
        """Note that the row has left the batch until its mask is ready."""
        self.grammar_waits += 1
        self.paused_at = time.monotonic()

    def insert(self, lookup: CacheLookup, *, is_resumed: bool) -> None:
        """Note that the row is in the batch, for the first time or after a pause."""
        if self.cached is None:
            self.cached, self.lookup = 0 if is_resumed else lookup.reused, lookup
        if self.paused_at:
            self.paused_s += time.monotonic() - self.paused_at
            self.paused_at = 0.0

    def add_drafts(self, counts: DraftedCounts) -> None:
        self.drafted += counts.drafted
        self.drafts_accepted += counts.accepted
        self.predicted += counts.predicted
        self.accepted += counts.predicted_accepted


@dataclass(slots=True, eq=False)
class Row:
    """Sequence of one request, owned by the engine thread once it leaves the intake.

    `output` holds every sampled token except the end-of-sequence token.
    """

    rid: int
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    text: RowText
    stats: RowStats
    top_logprobs: int | None = None
    priority: int = 0
    deadline: float | None = None
    want_progress: bool = False
    cache_salt: str = ""
    # Tenants take turns among rows of equal priority.
    tenant: str = ""
    # Positions where messages begin, for checkpoints of models whose caches cannot be cut.
    boundaries: list[int] = field(default_factory=list)
    # Logits processors of the row that run before the processors of its sampling parameters.
    processors: list[Any] = field(default_factory=list)
    # Token ids of the texts that the sampling parameters contain.
    words: BadWords = NO_WORDS
    # Constraint on the output; None for free text.
    rule: Rule | None = None
    drafting: Drafting = field(default_factory=Drafting)
    # Adapter of the row; None means the base model.
    adapter: Adapter | None = None
    # Media, in the order of the prompt.
    media: list[Span] = field(default_factory=list)
    # Positions `[3, prompt]` for models with spatial positions; otherwise None.
    positions: npt.NDArray[np.int32] | None = None
    # Fraction of the prompt that a sparse prefill processes; 0 without sparse prefill.
    keep: float = 0.0
    # Prompt tokens that a sparse prefill has selected; None until then.
    kept: SelectedTokens | None = None
    # Deviations from the request, except the deviations that the row's grammar reports.
    own_deviations: tuple[str, ...] = ()
    # Numbers of turns and of tokens that were truncated from the prompt.
    truncated: tuple[int, int] = (0, 0)
    report: PromptReport = field(default_factory=PromptReport)
    # Questions that are asked behind the prompt; None for a row that generates.
    questions: RowQuestions | None = None
    thinking: Thinking = field(default_factory=Thinking)

    output: list[int] = field(default_factory=list)
    # Position in the order of arrival.
    arrival: int = 0
    is_finished: bool = False
    # Pending disk reads of this row's prompt KV; None once the row is inserted.
    ticket: Ticket | None = None
    # Row whose prefill this waiting row needs, and up to which token; None if it waits for no prefill.
    awaited: "tuple[Row, int] | None" = None
    # State of the row in the batch; None while the row is not in the batch.
    sequence: "BatchSequence | None" = None
    _tokens: npt.NDArray[np.int32] | None = None
    _keys: npt.NDArray[np.int32] | None = None

    @property
    def arrived(self) -> float:
        return self.stats.arrived

    @property
    def is_awaiting(self) -> bool:
        """Whether the prefill that this row needs has not come far enough yet."""
        if self.awaited is None:
            return False
        other, tokens = self.awaited
        return other.sequence is not None and other.sequence.prefilled < tokens

    @property
    def deviations(self) -> tuple[str, ...]:
        """Deviations from the request, reported to its client."""
        return (*(self.rule.grammar.deviations if self.rule is not None else ()), *self.own_deviations)

    def tokens(self) -> npt.NDArray[np.int32]:
        """Return prompt and output so far, read-only. The array is reused until a token is added."""
        if self._tokens is None or len(self._tokens) != len(self.prompt) + len(self.output):
            self._tokens = np.array(self.prompt + self.output, dtype=np.int32)
        return self._tokens

    def keys(self) -> npt.NDArray[np.int32]:
        """Return `tokens` as keys of the prefix cache, in which the placeholders of a medium depend on its content.
        Read-only.
        """
        tokens = self.tokens()
        if not self.media:
            return tokens
        if self._keys is None or len(self._keys) != len(tokens):
            self._keys = media_keys(tokens, self.media)
        return self._keys

    @property
    def only_prefills(self) -> bool:
        """Whether the row ends with its prefill, which leaves the prompt in the prefix cache."""
        return self.max_tokens == 0 and not self.report.echo and self.report.scored_top is None

    @property
    def slots(self) -> int:
        """Number of the row's tokens, prompt and output, that have KV."""
        return self.prompt_slots + len(self.output)

    @property
    def prompt_slots(self) -> int:
        if self.questions is not None:
            return len(self.prompt) + self.questions.longest
        return count_kept(len(self.prompt), self.keep) if self.keep else len(self.prompt)

    @property
    def reusable(self) -> npt.NDArray[np.int32]:
        """Return the keys of tokens whose KV may come from the prefix cache. The last token is never among them,
        because it always runs. KV after the first gap of a sparse prompt differs from that of the whole text."""
        keys = self.keys()[:-1]
        return keys if self.kept is None else keys[: self.kept.leading]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt and of all questions."""
        return len(self.prompt) + (self.questions.tokens if self.questions is not None else 0)

    def whole(self, at: int) -> int:
        """Return the last position up to `at` where a prefix may end: not inside an image, a video or an audio clip,
        and for a row with questions only at the end of a slice."""
        if self.questions is not None:
            return self.questions.whole(at)
        return before_media(self.media, at) if self.media else at

    @property
    def adapter_slot(self) -> int:
        """Slot of the adapter; 0 is the base model."""
        return self.adapter.slot if self.adapter is not None else 0

    def usage(self, now: float) -> Usage:
        stats = self.stats
        admitted = stats.admitted or now
        first = stats.first_token or now
        return Usage(
            prompt=self.prompt_tokens,
            cached=stats.cached or 0,
            completion=stats.completion,
            reasoning=self.thinking.tokens,
            queue_ms=(admitted - stats.arrived) * 1e3,
            prefill_ms=(first - admitted) * 1e3,
            decode_ms=(now - first) * 1e3,
            image_tokens=self._media_tokens("image"),
            video_tokens=self._media_tokens("video"),
            audio_tokens=self._media_tokens("audio"),
            predicted=stats.predicted,
            accepted=stats.accepted,
            kept=self.prompt_slots if self.keep else 0,
            restored=stats.lookup.restored if stats.lookup is not None and stats.cached else 0,
            drafted=stats.drafted,
            drafts_accepted=stats.drafts_accepted,
            preemptions=stats.preemptions,
            grammar_waits=stats.grammar_waits,
            paused_ms=stats.paused_s * 1e3,
            rested_ms=stats.rested_s * 1e3,
        )

    def _media_tokens(self, kind: str) -> int:
        return sum(span.end - span.begin for span in self.media if span.medium.kind == kind)


class Context(TokenBuffer):
    """Tokens of a row for its processors, plus the tokens of a draft until the draft is verified."""

    def shorten(self, count: int) -> None:
        """Remove the newest tokens."""
        self._size -= count


@dataclass(slots=True, eq=False)
class BatchSequence:
    """Row in the batch, from its insertion until it ends, is preempted or waits for its grammar.

    `tokens` are those in its caches, `reused` of them from the prefix cache. `segments` are the tokens of prompt and
    earlier output that have not run, cut where a checkpoint may be taken and at the gaps of a sparse prefill; the last
    segment is one token, whose logits the first sample needs. `caches` are empty once they are merged with others.
    """

    row: Row
    segments: list[list[int]]
    caches: list[Any]
    tokens: list[int]
    draws: Draws
    processors: Sequence[Guard]
    stops: StopSequences.Matcher
    # Media, with the features that the prefill still needs.
    placement: MediaPlacement | None = None
    mask: MaskWork | None = None
    draft: DraftState = field(default_factory=DraftState)
    # Ends of segments that get a checkpoint; None means all segments.
    marks: frozenset[int] | None = None
    reused: int = 0
    # Number of tokens in all `segments`.
    total: int = 0
    # Number of tokens that have run.
    done: int = 0
    # Limit of `generated`, the tokens sampled since the insertion.
    max_tokens: int = 0
    generated: int = 0
    # Whether the newest input was a sampled token, not the prompt's last token.
    has_begun: bool = False
    # Generated tokens that are missing in the caches: after a partly rejected verify block, recurrent layers were
    # restored to their state before the block.
    owed: list[int] = field(default_factory=list[int])
    context: Context | None = None
    # Log-probabilities of the prompt, until they are complete and taken.
    scores: Scores | None = None
    # Forward passes of the row's questions, once its prompt has run.
    asking: Iterator[int] | None = None
    # All tokens but the last, kept for the processors of a row with a sparse prefill.
    text: Sequence[int] = ()
    # Number of tokens of the longest medium that no chunk may cut; 0 without such a medium.
    longest_whole: int = 0
    # Whether the prefix cache lacks the row's KV, which is stored at the end of the row or when a request can reuse it.
    is_unstored: bool = False

    def __post_init__(self) -> None:
        self.reused = len(self.tokens)
        self.max_tokens = self.row.max_tokens - len(self.row.output)
        last = self.segments[-1]
        if len(last) > 1:
            self.segments[-1:] = [last[:-1], last[-1:]]
        self.total = sum(len(segment) for segment in self.segments)

    @property
    def prefilled(self) -> int:
        """Number of tokens of prompt and earlier output that have been computed or reused."""
        return self.reused + self.done

    @property
    def skipped(self) -> int:
        """Number of prompt tokens that the sparse prefill left out before the row's next token. It is that token's
        position minus its slot.
        """
        kept = self.row.kept
        return kept.position_offset(len(self.tokens)) if kept is not None else 0

    @property
    def is_alone(self) -> bool:
        """Whether the row's prompt is computed alone, because the prompt is scored or has questions."""
        return self.scores is not None or self.row.questions is not None

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last token of the prompt is left to run."""
        return len(self.segments) == 1

    def ends(self, token: int) -> str | None:
        """Count a sampled token. Returns the finish reason, `stop` or `length`, if the token is the row's last one."""
        self.generated += 1
        if self.stops.advance(token):
            return "stop"
        return "length" if self.generated >= self.max_tokens else None


@dataclass(slots=True)
class Token:
    """One sampled token of a row. `ended` is the finish reason, `stop` or `length`, if the token is the row's last
    one."""

    row: Row
    id: int
    logprobs: mx.array
    ended: str | None = None
