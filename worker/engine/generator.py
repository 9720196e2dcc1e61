"""The loop that runs sequences on a model: prompts in chunks, then one step after the other for all of them.

The models and the caches of one sequence are mlx-lm's; the batch and its caches are ours.
"""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream

from worker.engine.batch_sequence import BatchSequences
from worker.engine.decode_batch import DecodeBatch
from worker.engine.forward import ForwardPart, can_pack, forward, has_media
from worker.engine.row import Member, Token
from worker.engine.scheduling.pass_time import PassTime
from worker.engine.scoring import ScoredRows
from worker.kv import batched, ragged
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.sampling.prompt_scores import Scores
from worker.sampling.sampler import RowSampler
from worker.speculation.drafter import Drafter

# Free buffers go back to the system after this many tokens of prefill, or this many steps, as with mlx-lm's.
CLEAR_TOKENS: Final = 2048
CLEAR_STEPS: Final = 512


@dataclass(slots=True)
class Prompted:
    """Progress of a prompt by `count` tokens; at its end it has one left, which runs with the rows that generate."""

    member: Member
    count: int
    is_segment_end: bool
    is_prompt_end: bool
    # Complete, of a prompt that is scored.
    scores: Scores | None = None


class Generator:
    """Runs sequences as their lane asks for. One thread owns it.

    A step gives all rows past their prompt a token, and runs one chunk of each of the others: in one forward pass
    where the chunks ride on the step, else in two.
    """

    def __init__(self, model: Any, sampler: RowSampler, lane: BatchMode, drafter: Drafter) -> None:
        self._model = model
        self._lane = lane
        self._stream = generation_stream
        # Members in the phases that they pass: inserted; in prefill, or scored one by one; past their prompt.
        self._waiting: deque[Member] = deque()
        self._prefill = BatchSequences()
        self._scored = ScoredRows(model)
        self._drafter = drafter
        self._decode = DecodeBatch(model, sampler, drafter)
        self._uncleared_tokens = 0
        self._uncleared_steps = 0
        # Forward passes whose time is known since the newest step.
        self.timed: list[PassTime] = []

    @property
    def stream(self) -> Any:
        return self._stream

    @property
    def nbytes(self) -> int:
        """Of all caches."""
        waiting = sum(cache.nbytes for member in self._waiting for cache in member.caches)
        return int(waiting + sum(rows.nbytes for rows in self._groups))

    @property
    def _groups(self) -> list[BatchSequences]:
        """Rows that are not waiting, by the caches that they share."""
        return [self._prefill, self._decode, *self._scored.rows]

    def generating(self) -> tuple[list[Member], list[Any]]:
        """The sequences past their prompt, in the order of the rows of their caches, and the caches."""
        return self._decode.members, self._decode.caches

    def insert(self, member: Member) -> None:
        """Queue a sequence, whose segments are not empty. One with scores holds no tokens yet."""
        member.caches = member.caches or make_caches(self._model)
        self._waiting.append(member)

    def extract(self, member: Member) -> tuple[list[Any], list[int]]:
        """The caches of one sequence, views while it is in a batch, and the tokens that they hold, if any."""
        if member in self._waiting:
            return (member.caches, member.tokens) if member.tokens else ([], [])
        rows = next(rows for rows in self._groups if member in rows.members)
        return rows.extract(rows.members.index(member))

    def discard(self, members: Collection[Member]) -> None:
        """Take sequences out, in any phase."""
        if not members:
            return
        self._waiting = deque(member for member in self._waiting if member not in members)
        for rows in (self._prefill, self._decode):
            rows.keep([at for at, member in enumerate(rows.members) if member not in members])
        self._scored.discard(members)

    def run_passes(self, chunk: int, *, rides: bool = True, reads: int = 0) -> tuple[list[Prompted], list[Token]]:
        """Passes of one step, with at most `chunk` tokens of each prompt; these ride on the step if they may and can.

        A model that drafts then reads at most `reads` tokens. The caller discards the sequences that ended before the
        next tick.
        """
        with mx.stream(self._stream):
            self._admit()
            prompted = self._join()
            began = time.perf_counter()
            prompts = self._chunk(chunk)
            rider = prompts if rides and self._can_ride() else None
            sampled = self._decode.decode(rider)
            self.timed = self._decode.timed
            if prompts is not None:
                self._run_prompts(prompts, rider is not None, began)
                prompted += [self._advance(*each) for each in zip(prompts.members, prompts.lengths, strict=True)]
            if reads:
                self._read(reads)
            self._uncleared_steps += bool(sampled)
            self._clear()
            return prompted + self._run_scored(chunk), sampled

    def wait(self) -> None:
        """Return when nothing of what was launched is running any more."""
        mx.synchronize(self._stream)
        self._decode.rest()

    def _admit(self) -> None:
        if not self._waiting:
            return
        single = self._lane is BatchMode.SINGLE
        if single:
            if any(map(len, self._groups)):
                return
            members = [self._waiting.popleft()]
        else:
            members, self._waiting = list(self._waiting), deque()
        for member in members:
            if member.scores is not None:
                self._scored.add(member, is_single=single)
        members = [member for member in members if member.scores is None]
        if not members:
            return
        caches = members[0].caches if single else batched.merge([member.caches for member in members])
        for member in members:
            member.caches = []
        self._prefill.extend(BatchSequences(members, caches))

    def _join(self) -> list[Prompted]:
        """Rows that have only the last token of their prompt left go on with the decode rows."""
        ready = [at for at, member in enumerate(self._prefill.members) if member.is_prefilled]
        groups = [self._prefill.split(ready)] if ready else []
        groups += self._scored.take_complete()
        for rows in groups:
            self._decode.join(rows)
        joined = [member for rows in groups for member in rows.members]
        prompted = [Prompted(member, member.total - member.done, True, True) for member in joined]
        for member in joined:
            member.done = member.total
        return prompted

    def _run_scored(self, chunk: int) -> list[Prompted]:
        """A slice of each prompt that is scored, or of one beside rows that generate; once it has only its last token
        left, its scores are complete."""
        prompted: list[Prompted] = []
        for rows in self._scored.due(is_alone=not len(self._decode)):
            member = rows.members[0]
            if not member.is_prefilled:
                self._decode.finish()
                prompted.append(self._advance(member, self._scored.run(rows, chunk)))
                self._decode.waited()
            if member.is_prefilled:
                scores, member.scores = member.scores, None
                prompted.append(Prompted(member, 0, False, False, scores))
        return prompted

    def _chunk(self, most: int) -> ForwardPart | None:
        """The next tokens of each prompt."""
        members = self._prefill.members
        if not members:
            return None
        if self._lane is BatchMode.EQUAL:  # a chunk that every row has the tokens for needs no padding
            most = min(most, *(len(member.segments[0]) for member in members))
        parts = [member.segments[0][:most] for member in members]
        lengths = [len(part) for part in parts]
        width = ragged.wide(max(lengths)) if self._lane is BatchMode.TOGETHER else max(lengths)
        inputs = mx.array([[*part, *[0] * (width - len(part))] for part in parts])
        return ForwardPart(members, inputs, self._prefill.caches, lengths)

    def _can_ride(self) -> bool:
        """Whether chunks of prompts can be in one pass with the decode step."""
        decode, prefill = self._decode.members, self._prefill.members
        return bool(decode) and can_pack(self._model) and not has_media(decode) and not has_media(prefill)

    def _run_prompts(self, prompts: ForwardPart, has_ridden: bool, began: float) -> None:
        """Run what has not ridden on the step, and take the padding back."""
        if not has_ridden:
            forward(self._model, prompts)
        batched.rewind(prompts.caches, prompts.excess)
        self._uncleared_tokens += prompts.width
        if has_ridden:
            self._prefill.launch()
            return
        self._decode.finish()
        self._prefill.evaluate()
        seconds = self._decode.waited() if len(self._decode) else time.perf_counter() - began
        self.timed.append(PassTime(seconds, prompted=sum(prompts.lengths)))

    def _read(self, count: int) -> None:
        self._decode.finish()
        if read := self._drafter.read(count):
            self._uncleared_tokens += read
            self.timed.append(PassTime(self._decode.waited(), prompted=read, is_reading=True))

    def _advance(self, member: Member, count: int) -> Prompted:
        segment = member.segments[0]
        member.tokens.extend(segment[:count])
        member.done += count
        member.segments[:1] = [segment[count:]] if segment[count:] else []
        return Prompted(member, count, not segment[count:], False)

    def _clear(self) -> None:
        """Give free buffers back now and then: beside running rows chunks are small, and the next step would ask for
        the same buffers again."""
        if self._uncleared_tokens >= CLEAR_TOKENS or self._uncleared_steps >= CLEAR_STEPS:
            self._uncleared_tokens = self._uncleared_steps = 0
            mx.clear_cache()
