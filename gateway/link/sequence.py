"""Record of a running or parked sequence: what its client was sent, and what its next worker needs."""

from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from gateway.link.collector import Collector
from protocol.from_worker import PromptPart
from protocol.to_worker import Generate

# Epoch of a sequence without a worker. Epochs of workers begin at 1, those of peer streams at -1.
PARKED: Final = 0


@dataclass(slots=True)
class Sequence:
    """Sequence between its Generate and its terminal event. Owned by the link.

    `generate` and `token_ids` (all that the client was sent) are what its next worker needs. While `epoch` is `PARKED`,
    messages about it are ignored.
    """

    generate: Generate
    epoch: int
    collector: Collector
    # Deadline on the loop's clock, and the timer for a worker that does not keep it.
    deadline: float | None = None
    timer: TimerHandle | None = None
    token_ids: list[int] = field(init=False)
    # Whether the client was sent output: an echo must not be repeated.
    has_output: bool = field(init=False)
    # Whether the client was sent the prompt's ids, and the number of its log-probability entries sent.
    has_prompt_ids: bool = False
    prompt_scored: int = field(init=False)
    # Number of log-probability entries of the echo that the client was sent.
    echo_scored: int = field(init=False)
    # Whether it has ended or was aborted.
    is_over: bool = False
    # Whether its first token, or its end, is reported with `SequenceProgressed`.
    is_watched: bool = False
    # Number of `token_ids` when its worker started it.
    resumed_tokens: int = field(init=False)
    resumes: int = 0
    # Consecutive workers that were lost without sending a token of it.
    fruitless_resumes: int = 0
    # Turns and tokens that its worker has left out of the prompt, which its next worker must leave out too.
    left_out: tuple[int, int] | None = None
    # Whether it may have crashed its workers.
    is_suspicious: bool = False

    def __post_init__(self) -> None:
        # A request of a client that an earlier gateway served begins with what that client has.
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
        """Whether its worker has sent no token of it: it was queued or in its prefill."""
        return len(self.token_ids) == self.resumed_tokens

    def note_prompt(self, part: PromptPart) -> None:
        self.has_prompt_ids = self.has_prompt_ids or bool(part.ids)
        self.prompt_scored += len(part.logprobs)

    def continuation(self, now: float) -> Generate:
        """The message that resumes the sequence on its next worker."""
        return replace(
            self.generate,
            resume=tuple(self.token_ids),
            # An echo with log-probabilities is sent in parts, some of which may be missing.
            echo=self.generate.echo and (self.echo_scored > 0 or not self.has_output),
            left_out=self.generate.left_out if self.left_out is None else self.left_out,
            prompt_ids=self.generate.prompt_ids and not self.has_prompt_ids,
            prompt_scored=self.prompt_scored,
            echo_scored=self.echo_scored,
            deadline_ms=0 if self.deadline is None else max(1, int((self.deadline - now) * 1000)),
        )
