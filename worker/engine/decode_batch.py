"""The rows that generate: one step for all of them, launched before the tokens of the step before are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from worker.engine.forward import forward
from worker.engine.member import Members
from worker.engine.sampling import RowSampler


@dataclass(slots=True)
class Sampled:
    """One token of one sequence; with its last one the reason, all its tokens and its caches."""

    uid: int
    token: int
    logprobs: mx.array
    ended: str | None = None
    tokens: list[int] | None = None
    caches: list[Any] | None = None


class DecodeBatch(Members):
    """Each row's input is a token that was sampled and not read yet, or the last of a prompt that has just joined."""

    def __init__(self, model: Any, sampler: RowSampler) -> None:
        super().__init__()
        self._model = model
        self._sampler = sampler
        self._inputs: mx.array | None = None
        # Of the inputs; those of prompts have none.
        self._logprobs: list[mx.array] = []

    def join(self, rows: Members) -> None:
        """Take over rows whose prompts have run but for the last token, which the next step runs."""
        last = mx.array([member.segments[0][0] for member in rows.members], dtype=mx.uint32)
        for member in rows.members:
            member.segments = []
            member.context = TokenBuffer(member.tokens) if member.processors else None
        self.extend(rows)
        self._inputs = last if self._inputs is None else mx.concatenate([self._inputs, last])
        self._logprobs += [last] * len(rows)

    def keep(self, rows: Sequence[int]) -> None:
        if self._inputs is not None and len(rows) < len(self.members):
            self._inputs = self._inputs[mx.array(list(rows))] if rows else None
            self._logprobs = [self._logprobs[at] for at in rows]
        super().keep(rows)

    def next(self) -> list[Sampled]:
        """One step: launch what follows the inputs, then read them."""
        if self._inputs is None:
            return []
        logprobs = self._logprobs
        ids = self._step(self._inputs)
        sampled: list[Sampled] = []
        kept: list[int] = []
        for at, (member, token) in enumerate(zip(self.members, ids, strict=True)):
            member.tokens.append(token)
            if member.has_begun:
                ended = member.ends(token)
                sampled.append(self._sampled(at, token, logprobs[at], ended))
                if ended is not None:
                    continue
            member.has_begun = True
            kept.append(at)
        self.keep(kept)
        return sampled

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
            ids = self._read(inputs)
            begun = [at for at, member in enumerate(self.members) if member.has_begun]
            masks.take([uids[at] for at in begun], [ids[at] for at in begun])
            logits = masks.apply(uids, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        with self._sampler.rows(uids):
            self._inputs = self._sampler(logprobs)
        before, self._logprobs = self._logprobs, list(logprobs)
        mx.async_eval(self._inputs, self._logprobs, contexts)
        mx.eval(before)
        return self._read(inputs)

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
