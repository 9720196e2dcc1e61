"""Record of a running or parked sequence: what its client has received, and what its next worker needs.

Events that the link reports for metrics.
"""

from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Final, Protocol

from msgspec.structs import replace

from gateway.link.collector import Collector
from protocol.from_worker import Pong, PromptPart, Step
from protocol.to_worker import Generate


class LinkEvents(Protocol):
    """Receiver of the link's events. Called on the event loop, so methods must be cheap and never raise."""

    def step(self, model: str, step: Step) -> None: ...
    def pong(self, model: str, pong: Pong) -> None: ...
    def stale_message(self) -> None: ...
    def malformed_frame(self) -> None: ...
    def sequences_resumed(self, model: str, sequences: int) -> None: ...
    def request_quarantined(self, model: str) -> None: ...


# Epoch of a sequence that has no worker. Workers have epochs from 1 upwards.
PARKED: Final = 0


@dataclass(slots=True)
class Sequence:
    """Sequence from its `Generate` to its terminal event. The link owns it.

    Its next worker needs `generate` and `token_ids`, which are all tokens that the client has received. While `epoch`
    is `PARKED`, messages about the sequence are ignored.
    """

    generate: Generate
    epoch: int
    collector: Collector
    # Deadline on the event loop's clock, and the timer that ends the sequence if its worker does not end it.
    deadline: float | None = None
    timer: TimerHandle | None = None
    token_ids: list[int] = field(init=False)
    # Whether the client has received any output. If so, an echo of the prompt must not be repeated.
    has_output: bool = field(init=False)
    # Whether the client has received the prompt's token ids, and the number of the prompt's log-probabilities that it
    # has received.
    has_prompt_ids: bool = False
    prompt_scored: int = field(init=False)
    # Number of log-probability entries of the echo that the client has received.
    echo_scored: int = field(init=False)
    # Whether the sequence has ended or was aborted.
    is_over: bool = False
    # Whether `SequenceProgressed` must be reported when the sequence has its next token or ends.
    is_watched: bool = False
    # Length of `token_ids` when the current worker started the sequence.
    resumed_tokens: int = field(init=False)
    resumes: int = 0
    # Number of consecutive workers that were lost before they sent a token of this sequence.
    fruitless_resumes: int = 0
    # Numbers of turns and of tokens that the worker left out of the prompt. The next worker must leave out the same.
    truncated: tuple[int, int] | None = None
    # Whether this sequence is suspected of crashing its workers.
    is_suspicious: bool = False

    def __post_init__(self) -> None:
        # If the request resumes a response of an earlier gateway, its client already has some output, with which the
        # sequence begins.
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
        """Whether the current worker has sent no token of this sequence yet. The sequence is queued or in prefill
        there.
        """
        return len(self.token_ids) == self.resumed_tokens

    def note_prompt(self, part: PromptPart) -> None:
        self.has_prompt_ids = self.has_prompt_ids or bool(part.ids)
        self.prompt_scored += len(part.logprobs)

    def continuation(self, now: float) -> Generate:
        """Return the message that resumes the sequence on its next worker."""
        return replace(
            self.generate,
            resume=tuple(self.token_ids),
            # An echo with log-probabilities is sent in parts, so its rest may still be missing even if the client has
            # output.
            echo=self.generate.echo and (self.echo_scored > 0 or not self.has_output),
            truncated=self.generate.truncated if self.truncated is None else self.truncated,
            prompt_ids=self.generate.prompt_ids and not self.has_prompt_ids,
            prompt_scored=self.prompt_scored,
            echo_scored=self.echo_scored,
            deadline_ms=0 if self.deadline is None else max(1, int((self.deadline - now) * 1000)),
        )
