"""Record of a running or parked sequence: the output that its client was sent, and the state for its next worker."""

from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from gateway.link.collector import Collector
from protocol.from_worker import PromptPart
from protocol.to_worker import Generate

# Epoch of a sequence without a worker. Epochs of workers count up from 1, those of peer streams down from -1.
PARKED: Final = 0


@dataclass(slots=True)
class Sequence:
    """Sequence between its Generate and its terminal event. Owned by the link.

    Its next worker needs `generate` and `token_ids`, which are all tokens that the client was sent. While `epoch` is
    `PARKED`, messages about the sequence are ignored.
    """

    generate: Generate
    epoch: int
    collector: Collector
    # Deadline on the event loop's clock, and the timer that ends the sequence if its worker does not.
    deadline: float | None = None
    timer: TimerHandle | None = None
    token_ids: list[int] = field(init=False)
    # Whether the client was sent any output; if so, an echo of the prompt must not be repeated.
    has_output: bool = field(init=False)
    # Whether the client was sent the prompt's token ids, and how many of the prompt's log-probability entries it was
    # sent.
    has_prompt_ids: bool = False
    prompt_scored: int = field(init=False)
    # How many of the echo's log-probability entries the client was sent.
    echo_scored: int = field(init=False)
    # Whether the sequence has ended or was aborted.
    is_over: bool = False
    # Whether `SequenceProgressed` must be reported at the sequence's next token or end.
    is_watched: bool = False
    # Length of `token_ids` when the current worker started the sequence.
    resumed_tokens: int = field(init=False)
    resumes: int = 0
    # How many workers in a row were lost before they sent a token of this sequence.
    fruitless_resumes: int = 0
    # Turns and tokens that the worker left out of the prompt. The next worker must leave out the same.
    left_out: tuple[int, int] | None = None
    # Whether this sequence may have crashed its workers.
    is_suspicious: bool = False

    def __post_init__(self) -> None:
        # A request that resumes a response of an earlier gateway begins with the output that its client already has.
        generate = self.generate
        self.token_ids = list(generate.resume)
        self.resumed_tokens = len(self.token_ids)
        self.has_output = bool(self.token_ids)
        self.prompt_scored = generate.prompt_scored
        self.echo_scored = generate.echo_scored

    @property
    def rid(self) -> int:
        return self.generate.rid

    @property
    def is_fresh(self) -> bool:
        """Whether the current worker has sent no token of this sequence, which is still queued or in prefill there."""
        return len(self.token_ids) == self.resumed_tokens

    def note_prompt(self, part: PromptPart) -> None:
        self.has_prompt_ids = self.has_prompt_ids or bool(part.ids)
        self.prompt_scored += len(part.logprobs)

    def continuation(self, now: float) -> Generate:
        """Return the message that resumes the sequence on its next worker."""
        return replace(
            self.generate,
            resume=tuple(self.token_ids),
            # An echo with log-probabilities is sent in parts, of which the client may lack some.
            echo=self.generate.echo and (self.echo_scored > 0 or not self.has_output),
            left_out=self.generate.left_out if self.left_out is None else self.left_out,
            prompt_ids=self.generate.prompt_ids and not self.has_prompt_ids,
            prompt_scored=self.prompt_scored,
            echo_scored=self.echo_scored,
            deadline_ms=0 if self.deadline is None else max(1, int((self.deadline - now) * 1000)),
        )
