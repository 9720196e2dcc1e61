"""One sequence on its way through the worker."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.messages import Sampling, TokenLogprob, Usage
from worker.model.lora.adapters import Adapter
from worker.output.detokenize import Detokenizer
from worker.output.parsers import Parser
from worker.output.stops import StopScanner
from worker.prefix_cache.prefix import Ticket
from worker.sampling.penalties import NO_WORDS, BadWords
from worker.sampling.prompt_scores import Scores
from worker.sparse.selected_tokens import SelectedTokens, count_kept
from worker.speculation.drafter import Drafting
from worker.structured.guides import Rule
from worker.vision.media import Span, before_media, media_keys


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
class Row:
    """Owned by the engine thread from the moment it leaves the intake. Times are of the monotonic clock.

    `output` holds every sampled token but the end-of-sequence one. A token is `held` while none of its text may leave,
    and `unsent` until a delta has carried its id.

    Of its text, `text_seen` characters were generated, `text_safe` of them are part of no stop string, `text_ready` may
    leave with the tokens that are out, and `text_sent` have left. `pending` is safe text that has not left.
    """

    rid: int
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    detokenizer: Detokenizer
    stops: StopScanner
    arrived: float
    top_logprobs: int | None = None
    echo: str = ""
    # The ids of the prompt are sent before its answer.
    tells_prompt: bool = False
    # The tokens of the prompt get log-probabilities, with so many of the likeliest; None once they have.
    scored_top: int | None = None
    # Likeliest tokens in entries beside the echo's, None where there are no such entries; and how many were sent.
    prompt_logprobs: int | None = None
    scores_told: int = 0
    # Entries of its echo that were sent, with the first of them the text.
    echo_told: int = 0
    # Those that are known, while there are more to come.
    scores: Scores | None = None
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
    # Whether the text that ends the output is part of it.
    includes_stop: bool = False
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
    # What is done in another way than the request says, beside what the rule leaves out.
    relaxed: tuple[str, ...] = ()
    # Turns and tokens that were left out of the prompt.
    left_out: tuple[int, int] = (0, 0)

    arrival: int = 0
    uid: int | None = None
    prefilled: int = 0
    reused: int = 0
    output: list[int] = field(default_factory=list)
    held: deque[HeldToken] = field(default_factory=deque[HeldToken])
    unsent: list[int] = field(default_factory=list)
    text_seen: int = 0
    text_safe: int = 0
    text_ready: int = 0
    text_sent: int = 0
    pending: str = ""
    # Text that the client of a resumed row has.
    text_resumed: int = 0
    parser: Parser | None = None
    # Ends with its first tool call.
    is_one_call: bool = False
    is_reasoning: bool = False
    thinking_budget: int | None = None
    # What is written for the model once the budget is used up.
    closing_ids: tuple[int, ...] = ()
    reasoning: int = 0
    # Prompt tokens that the prefix cache gave when the row was first inserted; later ones may be the row's own.
    cached: int | None = None
    completion: int = 0
    # Tokens of the client's prediction that were drafted, and of these the right ones.
    predicted: int = 0
    accepted: int = 0
    admitted: float = 0.0
    first_token: float = 0.0
    is_finished: bool = False
    # Ends of segments that are worth a checkpoint; None is each of them.
    marks: frozenset[int] | None = None
    # Reads from disk that this row waits for, or that wait for it.
    ticket: Ticket | None = None
    _tokens: npt.NDArray[np.int32] | None = None
    _keys: npt.NDArray[np.int32] | None = None

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

    @property
    def has_thought_enough(self) -> bool:
        return self.thinking_budget is not None and self.is_reasoning and self.reasoning >= self.thinking_budget

    def usage(self, now: float) -> Usage:
        admitted = self.admitted or now
        first = self.first_token or now
        return Usage(
            prompt=len(self.prompt),
            cached=self.cached or 0,
            completion=self.completion,
            reasoning=self.reasoning,
            queue_ms=(admitted - self.arrived) * 1e3,
            prefill_ms=(first - admitted) * 1e3,
            decode_ms=(now - first) * 1e3,
            image_tokens=self._media_tokens("image"),
            video_tokens=self._media_tokens("video"),
            audio_tokens=self._media_tokens("audio"),
            predicted=self.predicted,
            accepted=self.accepted,
            kept=self.prompt_slots if self.keep else 0,
        )

    def _media_tokens(self, kind: str) -> int:
        return sum(span.end - span.begin for span in self.media if span.medium.kind == kind)
