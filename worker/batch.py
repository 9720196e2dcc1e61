"""mlx-lm's `BatchGenerator` with rows that know who they are.

The only change is that sampling is told which requests a forward pass is for: the two batches that the generator
holds for its whole life are of our subclasses, and `extend`, `split` and `generate` keep them so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch, StopSequences

from worker.rows import Row
from worker.sampling import Guard, RowSampler, processors


class _PromptBatch(PromptProcessingBatch):
    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        with self.fallback_sampler.rows(self.uids):  # type: ignore[attr-defined]
            return super().generate(tokens)


class _DecodeBatch(GenerationBatch):
    def _step(self) -> Any:
        with self.fallback_sampler.rows(self.uids):  # type: ignore[attr-defined]
            return super()._step()


class _Generator(BatchGenerator):
    def __init__(self, model: Any, sampler: RowSampler, **options: Any) -> None:
        super().__init__(model, sampler=sampler, **options)
        self._prompt_batch = _PromptBatch.empty(model, sampler, prefill_step_size=self.prefill_step_size)
        self._generation_batch = _DecodeBatch.empty(model, sampler)


@dataclass(slots=True, frozen=True)
class Token:
    """One sampled token of one row; `ended` is mlx-lm's reason, `stop` or `length`."""

    row: Row
    id: int
    logprobs: mx.array
    ended: str | None


@dataclass(slots=True, frozen=True)
class Tick:
    """What one tick did."""

    tokens: list[Token]
    progress: list[tuple[Row, int, int]]
    broken: list[tuple[Row, Exception]]
    prefilled: int


class Batch:
    """The rows on the device. One thread owns it and everything MLX.

    `insert` takes a row at any time, `remove` takes it out in any phase, `tick` does one decode step for the decoding
    rows and then one chunk for the prefilling ones.
    """

    def __init__(self, model: Any, eos_ids: Sequence[int], max_running: int, max_chunk: int) -> None:
        self._sampler = RowSampler()
        self._rows: dict[int, Row] = {}
        self._guards: dict[int, list[Guard]] = {}
        self._prefilling: set[int] = set()
        self._eos = StopSequences([[token] for token in eos_ids])
        self._never = StopSequences()
        self._generator = _Generator(
            model,
            self._sampler,
            completion_batch_size=max_running,
            prefill_batch_size=max_running,
            prefill_step_size=max_chunk,
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    @property
    def prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def decoding(self) -> int:
        return len(self._rows) - len(self._prefilling)

    @property
    def kv_bytes(self) -> int:
        return int(self._generator.prompt_cache_nbytes)

    def insert(self, row: Row) -> None:
        """Queue prompt and output so far; sampling goes on at position len(output)."""
        tokens = row.prompt + row.output
        guards = [Guard(processor) for processor in (*row.processors, *processors(row.sampling, len(row.prompt)))]
        (uid,) = self._generator.insert(
            [tokens],
            [row.max_tokens - len(row.output)],
            logits_processors=[guards],
            stop_sequences=[self._never if row.sampling.ignore_eos else self._eos],
        )
        row.uid = uid
        self._rows[uid] = row
        self._guards[uid] = guards
        self._prefilling.add(uid)
        self._sampler.add(uid, row.sampling, len(row.output))

    def remove(self, row: Row) -> None:
        """Take a row out and free its cache. A row that is not in the batch is no error."""
        if row.uid is None:
            return
        self._generator.remove([row.uid])
        self._forget(row)

    def tick(self, chunk: int) -> Tick:
        """One decode step, then at most `chunk` prompt tokens of each prefilling row."""
        self._generator.prefill_step_size = chunk
        prompted, generated = self._generator.next()
        progress: list[tuple[Row, int, int]] = []
        prefilled = 0
        for response in prompted:
            row = self._rows[response.uid]
            done, total = response.progress
            prefilled += done - row.prefilled
            row.prefilled = done
            if response.end_of_prompt:
                self._prefilling.discard(response.uid)
            progress.append((row, done, total))
        broken = [
            (self._rows[uid], guard.error)
            for uid, guards in self._guards.items()
            for guard in guards
            if guard.error is not None
        ]
        tokens: list[Token] = []
        for response in generated:
            row = self._rows[response.uid]
            tokens.append(Token(row, response.token, response.logprobs, response.finish_reason))
            if response.finish_reason is not None:
                self._forget(row)
        return Tick(tokens, progress, broken, prefilled)

    def close(self) -> None:
        self._generator.close()

    def _forget(self, row: Row) -> None:
        assert row.uid is not None
        self._rows.pop(row.uid, None)
        self._guards.pop(row.uid, None)
        self._prefilling.discard(row.uid)
        self._sampler.discard(row.uid)
        row.uid = None
        row.prefilled = 0
