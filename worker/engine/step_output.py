"""Results of one step of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.engine.row import Row, Token
from worker.engine.scheduling.pass_time import PassTime
from worker.sampling.prompt_scores import Scores


@dataclass(slots=True, frozen=True)
class StepOutput:
    """Results of one step; `timed` are the forward passes whose time became known.

    `returned` are rows that have left the batch to wait for their media in the queue. `scoring` are rows with new
    log-probabilities of their prompt, `scored` are rows that have all log-probabilities of their prompt and no output
    yet. `answered` are rows whose questions are all answered.
    """

    tokens: list[Token]
    progress: list[tuple[Row, int, int]]
    broken: list[tuple[Row, Exception]]
    prefilled: int
    timed: Sequence[PassTime]
    returned: list[Row]
    scored: list[tuple[Row, Scores]]
    scoring: list[tuple[Row, Scores]]
    answered: list[Row]
