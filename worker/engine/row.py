"""Row: one sequence on its way through the worker, from the intake to its end.

While a row is in the batch it has a `BatchSequence`, which holds the state of all parts of the batch for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import TokenBuffer

from protocol.from_worker import TokenLogprob, Usage
from protocol.to_worker import Sampling
from worker.model.lora.adapters import Adapter
from worker.output.detokenize import Detokenizer
from worker.output.parsers import Parser
from worker.output.stops import StopScanner
from worker.prefix_cache.prefix import Ticket
from worker.sampling.penalties import NO_WORDS, BadWords
from worker.sampling.prompt_scores import Scores
from worker.sampling.sampler import Draws, Guard
from worker.sparse.selected_tokens import SelectedTokens, count_kept
from worker.speculation.draft_state import Drafting, DraftState
from worker.structured.guides import Rule
from worker.structured.masks import MaskWork
from worker.vision.media import Span, before_media, media_keys
from worker.vision.multimodal_merge import MediaPlacement


@dataclass(slots=True)
class HeldToken:
    """A sampled token, none of whose text may leave yet.

    Its text begins at `begin`. `safe` is the length of the text that no stop string could take back once the token was
    there. The client of a resumed row has the token where `is_sent` is set.
    """

    begin: int
    id: int
    logprob: TokenLogprob | None = None
    safe: int = 0
    is_sent: bool = False


@dataclass(slots=True, eq=False)
class RowText:
    """Owned by the writer. A token is `held` while none of its text may leave, and `unsent` until a delta has carried
    its id.

    `seen` characters were generated, `safe` of them are part of no stop string, `ready` may leave with the tokens that
    are out, and `sent` have left. `pending` is safe text that has not left. The client of a resumed row has `resumed`.
    """

    detokenizer: Detokenizer
    stops: StopScanner
    # Whether the text that ends the output is part of it.
    includes_stop: bool = False
    parser: Parser | None = None
    # Ends with its first tool call.
    is_one_call: bool = False
    held: deque[HeldToken] = field(default_factory=deque[HeldToken])
    unsent: list[int] = field(default_factory=list[int])
    seen: int = 0
    safe: int = 0
    ready: int = 0
    sent: int = 0
    pending: str = ""
    resumed: int = 0


@dataclass(slots=True, eq=False)
class Thinking:
    """Reasoning in the output: whether it goes on, and its tokens. `closing_ids` end it once `budget` is used up."""

    is_open: bool = False
    tokens: int = 0
    budget: int | None = None
    closing_ids: tuple[int, ...] = ()

    @property
    def is_enough(self) -> bool:
        return self.budget is not None and self.is_open and self.tokens >= self.budget


@dataclass(slots=True, eq=False)
class PromptReport:
    """What is sent of the prompt before the answer: its text, its ids, and log-probabilities of its tokens."""

    echo: str = ""
    sends_ids: bool = False
    # The tokens of the prompt get log-probabilities, with so many of the likeliest; None once they have.
    scored_top: int | None = None
    # Likeliest tokens in entries beside the echo's, None where there are no such entries; and how many were sent.
    logprobs: int | None = None
    scores_sent: int = 0
    # Entries of its echo that were sent, with the first of them the text.
    echo_sent: int = 0


@dataclass(slots=True, eq=False)
class RowStats:
    """Times, of the monotonic clock, and counts."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    # Prompt tokens that the prefix cache gave when the row was first inserted; later ones may be the row's own.
    cached: int | None = None
    completion: int = 0
    # Tokens of the client's prediction that were drafted, and of these the right ones.
    predicted: int = 0
    accepted: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """Owned by the engine thread from the moment it leaves the intake.

    `output` holds every sampled token but the end-of-sequence one.
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
    # Rows of equal priority run in turn by it.
    tenant: str = ""
    # Where messages begin in the prompt: worth a checkpoint for models whose caches cannot be cut.
    boundaries: list[int] = field(default_factory=list)
    # Called before the sampling parameters' own processors.
    processors: list[Any] = field(default_factory=list)
    # Token ids of texts that the sampling parameters name.
    words: BadWords = NO_WORDS
    # What the output must match.
    rule: Rule | None = None
    drafting: Drafting = field(default_factory=Drafting)
    # That the request names; None is the base model.
    adapter: Adapter | None = None
    # Media in the order of the prompt, and positions `[3, prompt]` for models that have them in space.
    media: list[Span] = field(default_factory=list)
    positions: npt.NDArray[np.int32] | None = None
    # Of a sparse prefill, the part of the prompt that runs, and once it is chosen, which; 0 is all of it.
    keep: float = 0.0
    kept: SelectedTokens | None = None
    # Deviations from the request, without those of its grammar.
    relaxed: tuple[str, ...] = ()
    # Turns and tokens that were left out of the prompt.
    left_out: tuple[int, int] = (0, 0)
    report: PromptReport = field(default_factory=PromptReport)
    thinking: Thinking = field(default_factory=Thinking)

    output: list[int] = field(default_factory=list)
    # Its place among all rows of the queue.
    arrival: int = 0
    is_finished: bool = False
    # Reads from disk that this row waits for, or that wait for it.
    ticket: Ticket | None = None
    # Its stay in the batch, while it is in.
    sequence: "BatchSequence | None" = None
    _tokens: npt.NDArray[np.int32] | None = None
    _keys: npt.NDArray[np.int32] | None = None

    @property
    def arrived(self) -> float:
        return self.stats.arrived

    @property
    def deviations(self) -> tuple[str, ...]:
        """Deviations from the request, reported to its client."""
        return (*(self.rule.grammar.relaxed if self.rule is not None else ()), *self.relaxed)

    def tokens(self) -> npt.NDArray[np.int32]:
        """Prompt and output so far; not to be written to. Made once for as long as no token is added."""
        if self._tokens is None or len(self._tokens) != len(self.prompt) + len(self.output):
            self._tokens = np.array(self.prompt + self.output, dtype=np.int32)
        return self._tokens

    def keys(self) -> npt.NDArray[np.int32]:
        """`tokens` as the prefix cache knows them: media by their content; not to be written to."""
        tokens = self.tokens()
        if not self.media:
            return tokens
        if self._keys is None or len(self._keys) != len(tokens):
            self._keys = media_keys(tokens, self.media)
        return self._keys

    @property
    def slots(self) -> int:
        """Tokens of KV of prompt and output so far."""
        return self.prompt_slots + len(self.output)

    @property
    def prompt_slots(self) -> int:
        return count_kept(len(self.prompt), self.keep) if self.keep else len(self.prompt)

    @property
    def reusable(self) -> npt.NDArray[np.int32]:
        """The keys that the prefix cache may have KV for: the last token always runs, and behind the first gap of a
        sparse prompt KV is another than that of the whole text."""
        keys = self.keys()[:-1]
        return keys if self.kept is None else keys[: self.kept.leading]

    def whole(self, at: int) -> int:
        """The last position up to `at` that cuts no medium."""
        return before_media(self.media, at) if self.media else at

    @property
    def adapter_slot(self) -> int:
        """Slot of its adapter; 0 is the base model."""
        return self.adapter.slot if self.adapter is not None else 0

    def usage(self, now: float) -> Usage:
        stats = self.stats
        admitted = stats.admitted or now
        first = stats.first_token or now
        return Usage(
            prompt=len(self.prompt),
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
        )

    def _media_tokens(self, kind: str) -> int:
        return sum(span.end - span.begin for span in self.media if span.medium.kind == kind)


class Context(TokenBuffer):
    """Tokens of a row that its processors are given, those of a draft among them until it is verified."""

    def shorten(self, count: int) -> None:
        """Take the newest tokens back."""
        self._size -= count


@dataclass(slots=True, eq=False)
class BatchSequence:
    """One stay of a row in the batch, from its insertion until it ends, is preempted or waits for its grammar.

    `tokens` are those that its caches hold, `reused` of them from the prefix cache. `segments` are the tokens of prompt
    and earlier output that have not run, cut where a checkpoint may be taken and where a sparse prefill has gaps; the
    last of them is one token, whose logits the first sample needs. `caches` are its own until they are merged with
    others.
    """

    row: Row
    segments: list[list[int]]
    caches: list[Any]
    tokens: list[int]
    draws: Draws
    processors: Sequence[Guard]
    stops: StopSequences.Matcher
    # Its media, with the features that its prefill still needs.
    placement: MediaPlacement | None = None
    # Work of its grammar.
    mask: MaskWork | None = None
    draft: DraftState = field(default_factory=DraftState)
    # Ends of segments that are worth a checkpoint; None is each of them.
    marks: frozenset[int] | None = None
    reused: int = 0
    # Of its segments: all tokens, and those that have run.
    total: int = 0
    done: int = 0
    # Tokens that it may generate during this stay.
    max_tokens: int = 0
    # Tokens sampled and given out.
    generated: int = 0
    # Its newest input was a token that was sampled, not the last of the prompt.
    has_begun: bool = False
    # Generated, but not in its caches: recurrent layers went back to before a block that was rejected in part.
    owed: list[int] = field(default_factory=list[int])
    context: Context | None = None
    # Log-probabilities of its prompt, where they are wanted, until they are complete and given out.
    scores: Scores | None = None
    # Prompt and earlier output but for the last token, where processors have to know what a sparse prefill leaves out.
    text: Sequence[int] = ()
    # Tokens of its longest medium whose tokens see each other: a slice has room for it. 0 without one.
    longest_whole: int = 0
    # Its KV is past the prompt and nowhere but in the batch: it is stored when it ends, or is asked for it.
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
        """Tokens of prompt and earlier output that have been computed or reused."""
        return self.reused + self.done

    @property
    def ahead(self) -> int:
        """Positions by which its next token is ahead of its slot."""
        kept = self.row.kept
        return kept.ahead(len(self.tokens)) if kept is not None else 0

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last token of its prompt is left to run."""
        return len(self.segments) == 1

    def ends(self, token: int) -> str | None:
        """Count a sampled token; the reason for which it is the last, `stop` or `length`."""
        self.generated += 1
        is_stop = self.stops.advance(token)
        if is_stop:
            return "stop"
        return "length" if self.generated >= self.max_tokens else None


@dataclass(slots=True)
class Token:
    """One sampled token of one row; `ended` is the reason for which it is the last, `stop` or `length`."""

    row: Row
    id: int
    logprobs: mx.array
    ended: str | None = None
