"""One sequence on its way: what its client has, and what a worker must know to go on with it."""

from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Final, Self

from msgspec.structs import replace

from gateway.link.collector import Collector
from protocol.from_worker import PromptPart
from protocol.to_worker import Generate

# The epoch of a sequence that no worker has: real ones begin at 1.
PARKED: Final = 0


@dataclass(slots=True)
class Sequence:
    """One sequence between its Generate and its terminal event. Owned by the link.

    `generate` and `token_ids` (all that the client was sent) are what a successor needs to go on. While `epoch` is
    `PARKED` no worker has it and nothing that a worker says about it counts.
    """

    generate: Generate
    epoch: int
    collector: Collector
    # Of the loop's clock; None without a deadline.
    deadline: float | None = None
    # Ends it when its worker does not.
    timer: TimerHandle | None = None
    token_ids: list[int] = field(default_factory=list)
    # The client has had a delta of its output: an echo must not come again.
    is_begun: bool = False
    # Of its prompt, the client has had the ids, and so many entries of its log-probabilities.
    has_prompt_ids: bool = False
    prompt_scored: int = 0
    # Entries of the echo's log-probabilities that the client has had.
    echo_scored: int = 0
    # It has ended or was aborted.
    is_over: bool = False
    # Its first token, or its end, is reported: others wait for it.
    is_watched: bool = False
    # Ids that its newest worker was given, how often it was given to another worker, and how often in a row without
    # a single token from that one.
    given: int = 0
    resumes: int = 0
    fruitless: int = 0
    # Turns and tokens that its worker has left out of its prompt, as its next one shall; None while it has not said.
    left_out: tuple[int, int] | None = None
    # It may be what kills its workers.
    is_suspicious: bool = False

    @classmethod
    def begin(cls, generate: Generate, epoch: int, collector: Collector, deadline: float | None) -> Self:
        """One that the worker of this epoch is sent now. It may go on from what an earlier gateway's client has."""
        had = list(generate.resume)
        return cls(
            generate,
            epoch,
            collector,
            deadline,
            token_ids=had,
            given=len(had),
            is_begun=bool(had),
            prompt_scored=generate.prompt_scored,
            echo_scored=generate.echo_scored,
        )

    @property
    def rid(self) -> int:
        return self.generate.rid

    @property
    def is_fresh(self) -> bool:
        """Whether its newest worker has sent no token of it: it was waiting or in its prefill."""
        return len(self.token_ids) == self.given

    def note_prompt(self, part: PromptPart) -> None:
        """Note a part of what the client wants to know of the prompt, which it is sent."""
        self.has_prompt_ids = self.has_prompt_ids or bool(part.ids)
        self.prompt_scored += len(part.logprobs)

    def continuation(self, now: float) -> Generate:
        """The message that resumes the sequence on its next worker."""
        return replace(
            self.generate,
            resume=tuple(self.token_ids),
            # One with log-probabilities comes in parts, of which the others are still wanted.
            echo=self.generate.echo and (self.echo_scored > 0 or not self.is_begun),
            left_out=self.generate.left_out if self.left_out is None else self.left_out,
            prompt_ids=self.generate.prompt_ids and not self.has_prompt_ids,
            prompt_scored=self.prompt_scored,
            echo_scored=self.echo_scored,
            deadline_ms=0 if self.deadline is None else max(1, int((self.deadline - now) * 1000)),
        )
