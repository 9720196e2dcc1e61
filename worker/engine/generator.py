"""mlx-lm's `BatchGenerator` with rows that know who they are.

Sampling is told which requests a forward pass is for, and a step with constrained rows waits for their masks after
the forward pass is launched: the two batches that the generator holds for its whole life are of our subclasses, and
`extend`, `split` and `generate` keep them so.
"""

from contextlib import nullcontext
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

from worker.cache.kv import extract, order_windows
from worker.engine.sampling import RowSampler
from worker.model.lanes import Lane
from worker.vision.graft import graft_of

# Free buffers go back to the system after this many tokens of prefill, as with chunks of mlx-lm's own size.
CLEAR_TOKENS: Final = 2048


class Generator(BatchGenerator):
    """Runs rows as their lane asks for."""

    def __init__(self, model: Any, sampler: RowSampler, lane: Lane, **options: Any) -> None:
        super().__init__(model, sampler=sampler, **options)
        self._lane = lane
        self._prompt_batch = _PromptBatch.empty(model, sampler, prefill_step_size=self.prefill_step_size)
        self._generation_batch = _DecodeBatch.empty(model, sampler)

    def _next(self) -> Any:
        if self._lane is Lane.EQUAL:
            self.prefill_step_size = min(self.prefill_step_size, self._shortest())
        return super()._next()

    def _shortest(self) -> int:
        """Tokens that every row in prefill has left in its segment: a chunk of no more needs no padding."""
        waiting = (row[1] for row in self._unprocessed_sequences)
        segments = [*(row[0] for row in self._currently_processing), *waiting]
        return min((len(parts[0]) for parts in segments if len(parts) > 1), default=self.prefill_step_size)

    def _make_batch(self, n: int) -> PromptProcessingBatch:
        if self._lane is not Lane.SINGLE:
            return super()._make_batch(n)
        assert n == 1, "the lane of one row takes one"
        row = self._unprocessed_sequences.popleft()
        self._unprocessed_sequences.appendleft((*row[:3], [], *row[4:]))
        batch = super()._make_batch(1)
        batch.prompt_cache = row[3]
        return batch


class _PromptBatch(PromptProcessingBatch):
    # Prompt tokens since free buffers were given back.
    unclear_tokens = 0

    def filter(self, keep: list[int]) -> None:
        """As mlx-lm's, but for all rows nothing: caches of the lane of one row have no `filter`."""
        if len(keep) < len(self.uids):
            super().filter(keep)

    def prompt(self, tokens: list[list[int]]) -> None:
        """As mlx-lm's for one chunk, but free buffers go back to the system no more often than with its own large
        chunks: beside running rows ours are small, and the next step would ask for the same buffers again."""
        if not tokens:
            return
        for held, new in zip(self.tokens, tokens, strict=True):
            held += new
        lengths = [len(new) for new in tokens]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            tokens = [[*new, *[0] * missing] for new, missing in zip(tokens, padding, strict=True)]
            for cache in self.prompt_cache:
                cache.prepare(lengths=lengths, right_padding=padding)
        if longest > 1:
            order_windows(self.prompt_cache)
        graft = graft_of(self.model)
        starts = [len(held) - length for held, length in zip(self.tokens, lengths, strict=True)]
        with graft.rows(self.uids, starts, lengths, longest) if graft is not None else nullcontext():
            self.model(mx.array(tokens), cache=self.prompt_cache)
        mx.eval([cache.state for cache in self.prompt_cache])
        if any(padding):
            for cache in self.prompt_cache:
                cache.finalize()
            mx.eval([cache.state for cache in self.prompt_cache])
        self.unclear_tokens += longest
        if self.unclear_tokens >= CLEAR_TOKENS:
            self.unclear_tokens = 0
            mx.clear_cache()

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        """As mlx-lm's, but what comes out is ours from its first step on."""
        assert all(len(last) == 1 for last in tokens), "the generator prefills all but the last token"
        batch = _DecodeBatch(
            self.model,
            self.uids,
            mx.array([last[-1] for last in tokens]),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
        )
        self.uids, self.prompt_cache, self.tokens = [], [], []
        self.samplers, self.logits_processors, self.stop_sequences, self.max_tokens = [], [], [], []
        return batch

    def extract_cache(self, idx: int) -> list[Any]:
        return extract(self.prompt_cache, idx)


class _DecodeBatch(GenerationBatch):
    def _step(self) -> Any:
        sampler = cast(RowSampler, self.fallback_sampler)
        graft = graft_of(self.model)
        starts = [len(held) for held in self.tokens] if graft is not None else []
        with (
            sampler.rows(self.uids),
            graft.rows(self.uids, starts, [1] * len(starts), 1) if graft is not None else nullcontext(),
        ):
            if sampler.masks.constrains(self.uids):
                return self._constrained_step(sampler)
            return super()._step()

    def _constrained_step(self, sampler: RowSampler) -> tuple[list[int], list[mx.array]]:
        """mlx-lm's `_step`, launched in two parts: see `worker.structured.masks`."""
        is_first = cast(mx.array | None, self._current_tokens) is None
        inputs = self._current_tokens = self._next_tokens
        self._current_logprobs = self._next_logprobs
        logits = self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :]
        logits, contexts = self._process(inputs, logits)
        mx.async_eval(logits, contexts)
        mx.eval(inputs, self._current_logprobs)
        ids: Any = inputs.tolist()
        if not is_first:  # the first inputs are of the prompt
            sampler.masks.take(self.uids, ids)
        logits = sampler.masks.apply(self.uids, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._next_tokens = sampler(logprobs)
        self._next_logprobs = list(logprobs)
        mx.async_eval(self._next_tokens, self._next_logprobs)
        for tokens, token in zip(self.tokens, ids, strict=True):
            tokens.append(token)
        return ids, self._current_logprobs

    def _process(self, inputs: mx.array, logits: mx.array) -> tuple[mx.array, list[mx.array]]:
        """Logits after the processors of each row, and the contexts that they were given."""
        contexts: list[mx.array] = []
        for at, chain in enumerate(self.logits_processors or ()):
            if chain:
                context = self._token_context[at].update_and_fetch(inputs[at : at + 1])
                contexts.append(context)
                row = logits[at : at + 1]
                for processor in chain:
                    row = processor(context, row)
                logits[at : at + 1] = row
        return logits, contexts

    def extract_cache(self, idx: int) -> list[Any]:
        return extract(self.prompt_cache, idx)
