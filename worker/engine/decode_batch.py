"""The rows that generate: a step for all of them gives each one token, or those of its draft that are right as well.

A plain step is launched before the tokens of the step before are read. A block is a row's newest token and a draft of
what follows, in one forward pass: at each position the row samples as it would have, and the draft counts for as long
as it is what was sampled. Caches that keep tokens one by one are rewound. Recurrent layers cannot be: a row that is
rejected in part goes back to where the block began, and owes the tokens that it has generated; they lead its next
block, which has no draft if there would be too many of them, and so is kept whole.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from worker.cache import batched
from worker.engine.forward import forward
from worker.engine.member import Member, Members
from worker.engine.sampling import RowSampler
from worker.speculation.drafter import Drafter

# Tokens that a block of a row with recurrent layers may have: what is not kept is run again.
REFEED: Final = 16


@dataclass(slots=True)
class Sampled:
    """One token of one sequence; with its last one the reason, all its tokens and its caches."""

    uid: int
    token: int
    logprobs: mx.array
    ended: str | None = None
    tokens: list[int] | None = None
    caches: list[Any] | None = None


@dataclass(slots=True)
class _Block:
    """The tokens of one forward pass: of each row what it owes, its newest token and its draft, then padding."""

    rows: list[list[int]]
    lengths: list[int]
    # Where each row's newest token is.
    begins: list[int]
    newest: list[int]
    drafts: list[list[int]]
    # Of each draft, tokens that are generated.
    accepted: list[int] = field(default_factory=list[int])

    @classmethod
    def of(cls, members: Sequence[Member], ids: Sequence[int], drafts: list[list[int]]) -> "_Block":
        rows = [[*member.owed, token, *draft] for member, token, draft in zip(members, ids, drafts, strict=True)]
        lengths = [len(row) for row in rows]
        padded = [[*row, *[0] * (max(lengths) - len(row))] for row in rows]
        return cls(padded, lengths, [len(member.owed) for member in members], list(ids), drafts)

    @property
    def width(self) -> int:
        return len(self.rows[0])

    def kept(self, at: int) -> int:
        """Tokens of a row that stay."""
        return self.begins[at] + 1 + self.accepted[at]

    def said(self, at: int) -> list[int]:
        """Tokens that a row generates."""
        return self.rows[at][self.begins[at] : self.kept(at)]


class DecodeBatch(Members):
    """Each row's input is a token that was sampled and not read yet, or the last of a prompt that has just joined."""

    def __init__(self, model: Any, sampler: RowSampler, drafter: Drafter) -> None:
        super().__init__()
        self._model = model
        self._sampler = sampler
        self._drafter = drafter
        self._is_recurrent = False
        self._inputs: mx.array | None = None
        # Of the inputs; those of prompts have none.
        self._logprobs: list[mx.array] = []
        # Seconds of the newest step if it was a block, else 0.
        self.block_s = 0.0
        # Rows of the newest step, whether it was a block, and its end; None where no time can be taken from it.
        self._last: tuple[int, bool, float] | None = None

    def join(self, rows: Members) -> None:
        """Take over rows whose prompts have run but for the last token, which the next step runs."""
        last = mx.array([member.segments[0][0] for member in rows.members], dtype=mx.uint32)
        for member in rows.members:
            member.segments = []
            member.context = TokenBuffer(member.tokens) if member.processors else None
        self.extend(rows)
        self._last = None
        self._is_recurrent = batched.is_recurrent(self.caches)
        self._inputs = last if self._inputs is None else mx.concatenate([self._inputs, last])
        self._logprobs += [last] * len(rows)

    def keep(self, rows: Sequence[int]) -> None:
        if self._inputs is not None and len(rows) < len(self.members):
            self._inputs = self._inputs[mx.array(list(rows))] if rows else None
            self._logprobs = [self._logprobs[at] for at in rows]
        super().keep(rows)

    def next(self, *, is_steady: bool) -> list[Sampled]:
        """One step; `is_steady` if nothing else has run since the one before."""
        self.block_s = 0.0
        if self._inputs is None:
            return []
        rows, began = len(self), time.perf_counter()
        if not is_steady:
            self._last = None
        block = self._draft(self._inputs)
        if block is None:
            sampled = self._plain(self._inputs)
            self._time(rows, 1, began, began)
            return sampled
        launched = time.perf_counter()
        sampled = self._verify(block)
        self.block_s = time.perf_counter() - began
        self._time(rows, block.width, began, launched)
        return sampled

    def _time(self, rows: int, width: int, began: float, launched: float) -> None:
        """Tell the drafter of a step's time.

        A plain step runs while the tokens before it are sent, so it takes from the end of one plain step to the end of
        the next. A block takes from its launch to its end; nothing runs while its tokens are sent, so that time counts
        as well where a block follows.
        """
        ended = time.perf_counter()
        last, self._last = self._last, (rows, width > 1, ended)
        follows = last is not None and last[:2] == self._last[:2]
        since = last[2] if last is not None and follows else began
        if width > 1:
            self._drafter.timed(rows, width, ended - launched + began - since)
        elif follows:
            self._drafter.timed(rows, 1, ended - since)

    def _plain(self, inputs: mx.array) -> list[Sampled]:
        """Launch what follows the inputs, then read them."""
        logprobs = self._logprobs
        ids = self._step(inputs)
        sampled: list[Sampled] = []
        kept: list[int] = []
        for at, (member, token) in enumerate(zip(self.members, ids, strict=True)):
            member.tokens.append(token)
            if member.has_begun:
                ended = member.ends(token)
                self._drafter.note(member.uid, (token,))
                sampled.append(self._sampled(at, token, logprobs[at], ended))
                if ended is not None:
                    continue
            member.has_begun = True
            kept.append(at)
        self.keep(kept)
        return sampled

    def _draft(self, inputs: mx.array) -> "_Block | None":
        """The next block; None where no row has a draft, or owes tokens."""
        if self._drafter.widest == 1:
            return None
        uids, most = [member.uid for member in self.members], [self._most(member) for member in self.members]
        owes = any(member.owed for member in self.members)
        if not owes and not self._drafter.is_ready(uids, most):
            return None
        ids = self._read(inputs)
        drafts = self._drafter.drafts(uids, ids, most)
        return _Block.of(self.members, ids, drafts) if owes or any(drafts) else None

    def _most(self, member: Member) -> int:
        """Tokens of a draft that a row can take: none where each token decides what the next may be."""
        if not member.has_begun or member.context is not None or self._sampler.masks.constrains([member.uid]):
            return 0
        left = max(0, member.max_tokens - member.generated - 1)
        return min(left, max(0, REFEED - 1 - len(member.owed))) if self._is_recurrent else left

    def _verify(self, block: "_Block") -> list[Sampled]:
        """Run a block and keep of each row what it would have generated without."""
        before = batched.states(self.caches)
        logits = forward(self._model, self.members, mx.array(block.rows), self.caches, block.lengths)
        logprobs, targets = self._targets(block, logits)
        mx.eval(targets, self._logprobs)
        chosen: Any = targets.tolist()
        sampled: list[Sampled] = []
        ends: dict[int, str] = {}
        for at, member in enumerate(self.members):
            block.accepted.append(_agreed(block.drafts[at], chosen[at]))
            own = [self._logprobs[at], *(logprobs[at, step] for step in range(block.accepted[at]))]
            for count, (token, each) in enumerate(zip(block.said(at), own, strict=True) if member.has_begun else (), 1):
                ended = member.ends(token)
                sampled.append(Sampled(member.uid, token, each, ended))
                if ended is not None:
                    ends[at], block.accepted[at] = ended, count - 1
                    break
            if member.has_begun:
                self._drafter.note(member.uid, block.said(at))
            member.has_begun = True
        self._settle(block, before)
        with self._sampler.rows([member.uid for member in self.members]):
            self._sampler.advance([count + 1 for count in block.accepted])
        self._drafter.verified([member.uid for member in self.members], block.drafts, block.accepted)
        self._inputs = mx.array(
            [row[count] for row, count in zip(chosen, block.accepted, strict=True)], dtype=mx.uint32
        )
        self._logprobs = [logprobs[at, count] for at, count in enumerate(block.accepted)]
        mx.async_eval(self._logprobs, [each.logprobs for each in sampled])
        rows = {self.members[at].uid: at for at in ends}
        for each in sampled:
            if each.ended is not None:
                each.caches, each.tokens = self.extract(rows[each.uid])
        self.keep([at for at in range(len(self.members)) if at not in ends])
        return sampled

    def _settle(self, block: "_Block", before: Sequence[list[Any]]) -> None:
        """Take back from the caches what was not accepted."""
        drop: list[int] = []
        is_back = [bool(before) and block.kept(at) < block.lengths[at] for at in range(len(self.members))]
        for at, member in enumerate(self.members):
            kept = block.rows[at][: block.kept(at)]
            if is_back[at]:
                member.owed = kept
                drop.append(block.width)
            else:
                member.tokens.extend(kept)
                member.owed = []
                drop.append(block.width - len(kept))
        batched.rewind(self.caches, drop)
        batched.restore(self.caches, before, is_back)

    def _targets(self, block: "_Block", logits: mx.array) -> tuple[mx.array, mx.array]:
        """Log-probabilities `[rows, steps, vocab]` and ids `[rows, steps]` of what follows each row's newest token."""
        masks, uids = self._sampler.masks, [member.uid for member in self.members]
        steps = max(len(draft) for draft in block.drafts) + 1
        if any(block.begins):
            at = mx.minimum(mx.array(block.begins)[:, None] + mx.arange(steps), block.width - 1)
            logits = mx.take_along_axis(logits, at[..., None], axis=1)
        else:
            logits = logits[:, :steps]
        first, contexts = self._process(mx.array(block.newest, dtype=mx.uint32), logits[:, 0])
        if masks.constrains(uids):
            mx.async_eval(logits, first, contexts)
            self._take_masks(uids, block.newest)
            first = masks.apply(uids, first)
        if contexts or masks.constrains(uids):
            logits = mx.concatenate([first[:, None], logits[:, 1:]], axis=1)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        with self._sampler.rows(uids):
            return logprobs, self._sampler.block(logprobs)

    def _sampled(self, at: int, token: int, logprobs: mx.array, ended: str | None) -> Sampled:
        member = self.members[at]
        if ended is None:
            return Sampled(member.uid, token, logprobs)
        caches, tokens = self.extract(at)
        return Sampled(member.uid, token, logprobs, ended, tokens, caches)

    def _step(self, inputs: mx.array) -> list[int]:
        """Sample the tokens after `inputs`, which are read while that runs; rows with a grammar need them before.

        See `worker.structured.masks` for what such rows wait for.
        """
        masks, uids = self._sampler.masks, [member.uid for member in self.members]
        logits = forward(self._model, self.members, inputs[:, None], self.caches)[:, -1, :]
        logits, contexts = self._process(inputs, logits)
        if masks.constrains(uids):
            mx.async_eval(logits, contexts)
            self._take_masks(uids, self._read(inputs))
            logits = masks.apply(uids, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        with self._sampler.rows(uids):
            self._inputs = self._sampler(logprobs)
        before, self._logprobs = self._logprobs, list(logprobs)
        mx.async_eval(self._inputs, self._logprobs, contexts)
        mx.eval(before)
        return self._read(inputs)

    def _take_masks(self, uids: Sequence[int], ids: Sequence[int]) -> None:
        """Tell grammars of the tokens that the running forward pass is for; the last of a prompt is not theirs."""
        begun = [at for at, member in enumerate(self.members) if member.has_begun]
        self._sampler.masks.take([uids[at] for at in begun], [ids[at] for at in begun])

    def _read(self, inputs: mx.array) -> list[int]:
        ids: Any = inputs.tolist()
        return ids

    def _process(self, inputs: mx.array, logits: mx.array) -> tuple[mx.array, list[mx.array]]:
        """Logits after the processors of each row, and the contexts that they were given."""
        contexts: list[mx.array] = []
        for at, member in enumerate(self.members):
            if member.context is not None:
                context = member.context.update_and_fetch(inputs[at : at + 1])
                contexts.append(context)
                row = logits[at : at + 1]
                for processor in member.processors:
                    row = processor(context, row)
                logits[at : at + 1] = row
        return logits, contexts


def _agreed(draft: Sequence[int], targets: Sequence[int]) -> int:
    """Leading tokens of a draft that are the ones sampled."""
    return next((at for at, token in enumerate(draft) if token != targets[at]), len(draft))
