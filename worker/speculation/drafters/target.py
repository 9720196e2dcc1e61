"""Parts of the target model that drafters use: hidden states, embedding table, head and vocabulary size.

Hidden-state capture: inputs of some of the target's layers, for drafters that use them.

A module is wrapped once, when the model is loaded, and its input is kept while a batch has drafts. A record holds the
position of each row's states in the row's text. Records include states of rejected tokens, which readers skip by that
position.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from worker.model.loader import cast, nbytes
from worker.speculation.draft_state import DraftState
from worker.vision.multimodal_merge import WrappedModule, text_core

# Number of a prompt's last tokens whose states are kept, for a drafter that needs only the last ones.
PROMPT_TAIL_TOKENS: Final = 256
# Maximum number of records; beyond it the oldest is dropped, even if it was not used.
_MAX_RECORDS: Final = 256
_MAX_RECORD_BYTES: Final = 64 << 20


@dataclass(slots=True, frozen=True)
class CapturedStates:
    """Inputs of the captured modules in one forward pass, concatenated, `[rows, width, size]`.

    Row i has the states of `lengths[i]` tokens of its text, beginning at token `starts[i]`; they begin at column
    `begins[i]`.
    """

    rows: Sequence[DraftState]
    starts: Sequence[int]
    begins: Sequence[int]
    lengths: Sequence[int]
    states: mx.array


class HiddenStateCapture:
    """Records of the newest forward passes; only the last `tail` tokens of a prompt are kept. Owned by the engine
    thread."""

    def __init__(self, tail: int = PROMPT_TAIL_TOKENS) -> None:
        self._tail = tail
        # Whether a batch has drafts; otherwise no state is kept.
        self.is_on = False
        self.records: deque[CapturedStates] = deque()
        self.nbytes = 0
        self._inputs: dict[int, mx.array] = {}

    def see(self, place: int, x: mx.array) -> None:
        if self.is_on:
            self._inputs[place] = x

    def take_inputs(self) -> tuple[mx.array, ...]:
        """Return and clear the inputs of the captured modules in the pass just built, in the order of their places."""
        inputs, self._inputs = self._inputs, {}
        return tuple(state for _, state in sorted(inputs.items()))

    def keep(
        self,
        states: tuple[mx.array, ...],
        rows: Sequence[DraftState],
        starts: Sequence[int],
        lengths: Sequence[int],
        left: Sequence[int],
        *,
        is_packed: bool = False,
    ) -> None:
        """Record states `[rows, width, size]` of a pass, or of one part of a packed pass.

        `left` are the tokens of each row's prompt that follow the pass.
        """
        near = [max(0, min(length, self._tail - after)) for length, after in zip(lengths, left, strict=True)]
        if not any(near):
            return
        width = states[0].shape[1]
        begin = min(length - count for length, count in zip(lengths, near, strict=True) if count)
        if is_view := width > 1 or is_packed:
            # A view would keep its whole array in memory, which may be that of a long prompt or of all parts of the
            # pass.
            states = tuple(mx.contiguous(state[:, begin:]) for state in states)
        joined = states[0] if len(states) == 1 else mx.concatenate(list(states), axis=-1)
        if is_view:
            mx.async_eval(joined)
        begins = [max(0, length - count - begin) for length, count in zip(lengths, near, strict=True)]
        starts = [start + begin + at for start, at in zip(starts, begins, strict=True)]
        self.records.append(CapturedStates(rows, starts, begins, near, joined))
        self.nbytes += joined.nbytes
        while self.nbytes > _MAX_RECORD_BYTES or len(self.records) > _MAX_RECORDS:
            self.nbytes -= self.records.popleft().states.nbytes

    def switch(self, *, is_on: bool) -> None:
        """Turn the capture on or off, and drop all records."""
        self.is_on = is_on
        self.records.clear()
        self._inputs.clear()
        self.nbytes = 0


class CapturePoint(WrappedModule):
    """Wrapper of a module that captures its input."""

    def __init__(self, module: Any, capture: HiddenStateCapture, place: int) -> None:
        super().__init__(module)
        self._capture = capture
        self._place = place

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        self._capture.see(self._place, x)
        return self.module(x, *args, **kwargs)


def capture_of(model: Any) -> HiddenStateCapture | None:
    """Return the capture of a model while its batch has drafts; otherwise None."""
    capture: HiddenStateCapture | None = getattr(model, "capture", None)
    return capture if capture is not None and capture.is_on else None


def core_of(model: Any) -> Any:
    """Return the model's part with the layers, the last norm and the embedding table. Raises ValueError for another
    structure.
    """
    inner = getattr(model, "model", None)
    if all(hasattr(inner, name) for name in ("word_embeddings", "layers", "norm")):
        return inner
    return text_core(model)


def tables(model: Any, own: Mapping[str, mx.array] = MappingProxyType({})) -> tuple[Any, Any]:
    """Return the embedding table and the function from hidden states to logits: `own` arrays replace the target's."""
    core, holder = core_of(model), model
    if getattr(holder, "lm_head", None) is None:
        holder = getattr(model, "language_model", model)
    embed = getattr(getattr(model, "multimodal_merge", None), "embed", None) or getattr(core, "embed_tokens", None)
    embed = embed or core.word_embeddings
    lm_head = getattr(holder, "lm_head", None) or embed.as_linear
    if "embed" in own:
        embed = nn.Embedding(1, 1)
        embed.weight = own["embed"]
    if "lm_head" in own:
        lm_head = nn.Linear(1, 1, bias=False)
        lm_head.weight = own["lm_head"]
    return embed, lm_head


def with_vocab(logits: mx.array, vocab: int) -> mx.array:
    """Cut or pad logits to `[…, vocab]`: the sampling noise depends on the target's vocabulary size."""
    logits = logits[..., :vocab]
    missing = vocab - logits.shape[-1]
    if not missing:
        return logits
    return mx.pad(logits, [*[(0, 0)] * (logits.ndim - 1), (0, missing)], constant_values=-mx.inf)


def evaluate_weights(module: Any, dtype: mx.Dtype) -> int:
    """Evaluate the weights of a drafter, cast to float32 if the target's are; return their bytes."""
    if dtype == mx.float32:
        cast(module, "float32")
    mx.eval(module.parameters())
    return nbytes(module)
