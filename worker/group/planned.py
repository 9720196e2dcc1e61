"""Batch and prefix cache of rank 0, which record their operations for the followers."""

from collections.abc import Sequence
from typing import Any, Protocol

from protocol.failures import Code
from protocol.group import BeginGroup, ClearCache, InsertRow, Op, RemoveRow, ResizeCache, SettleMemory
from worker.engine.batch import Batch
from worker.engine.row import BatchSequence, Token
from worker.engine.step_output import StepOutput
from worker.errors import PartnerLost, StepFailed, is_fabric_fault
from worker.kv.kv import KvLayout
from worker.model.batch_mode import BatchMode
from worker.prefix_cache.prefix import PrefixCache
from worker.prefix_cache.radix_tree import TokenCost


class Planner(Protocol):
    """Port to the plans of rank 0, owned by the engine thread. `token_cost` is the cost of cached prefixes."""

    token_cost: TokenCost | None

    def note(self, op: Op) -> None:
        """Record an operation, which followers execute with the next plan."""
        ...

    def begin(self, chunk: int, *, is_fused: bool) -> None:
        """Send the next plan, whose tick also runs on rank 0 now."""
        ...

    def confirm(self, tokens: Sequence[Token]) -> None:
        """Wait until all ranks have done the plan. Raises `PartnerLost` if a rank has generated other tokens."""
        ...


class PlannedCache(PrefixCache):
    """Prefix cache of rank 0, which records its operations for the followers."""

    def __init__(self, layout: KvLayout, budget: int, planner: Planner) -> None:
        super().__init__(layout, budget)
        self._planner = planner

    def resize(self, budget: int, token_cost: TokenCost | None = None) -> None:
        token_cost = self._planner.token_cost
        if token_cost is None:
            self._planner.note(ResizeCache(budget))
        else:
            self._planner.note(ResizeCache(budget, token_cost.token_bytes, token_cost.state_bytes, token_cost.arrays))
        super().resize(budget, token_cost)

    def clear(self) -> None:
        self._planner.note(ClearCache())
        super().clear()


class PlannedBatch(Batch):
    """Batch of rank 0, which records its operations for the followers."""

    def __init__(
        self, model: Any, eos_ids: Sequence[int], cache: PrefixCache, mode: BatchMode, planner: Planner
    ) -> None:
        planner.note(BeginGroup(mode, cache.budget, cache.needs_checkpoints))
        self._planner = planner
        super().__init__(model, eos_ids, cache, mode)

    def _enter(self, sequence: BatchSequence) -> None:
        row = sequence.row
        insert = InsertRow(
            row.rid,
            row.prompt,
            row.output,
            row.max_tokens,
            sequence.reused,
            row.sampling.ignore_eos and row.rule is None,
            row.sampling.stop_ids,
            row.boundaries,
            row.cache_salt,
            row.report.scored_top,
            list(row.questions.left) if row.questions is not None else [],
            list(row.questions.slices) if row.questions is not None else [],
        )
        self._planner.note(insert)
        super()._enter(sequence)

    def _take_out(self, sequence: BatchSequence) -> list[int]:
        self._planner.note(RemoveRow(sequence.row.rid))
        return super()._take_out(sequence)

    def settle(self) -> None:
        if self._ended:
            self._planner.note(SettleMemory())
        super().settle()

    def _begin(self, chunk: int, *, is_fused: bool) -> None:
        self._planner.begin(chunk, is_fused=is_fused)

    def step(self, chunk: int, *, is_fused: bool = True, reads: int = 0) -> StepOutput:
        """Run one step of all ranks. Tokens are returned only after all ranks have generated them."""
        try:
            output = super().step(chunk, is_fused=is_fused, reads=reads)
        except StepFailed:
            raise
        except Exception as error:  # any error of MLX means that the ranks differ in their state
            if is_fabric_fault(error):
                raise PartnerLost("the connection between the ranks of the group was lost", repr(error)) from error
            raise StepFailed(Code.WORKER_DIED, "the group's step failed", detail=repr(error)) from error
        self._planner.confirm(output.tokens)
        return output
