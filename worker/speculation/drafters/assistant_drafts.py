"""Drafts by a Gemma 4 assistant, for the rows of a batch.

An assistant has no keys and values of its own: its few layers look at those of the target's last layer of each kind. It
is fed with the target's last state and the token after it, then with its own, and stays at one position.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.gemma4_assistant import Gemma4AssistantDraftModel

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Draw, Rows
from worker.speculation.drafters.hidden_states import HiddenStateCapture
from worker.speculation.drafters.logits import as_wide
from worker.speculation.drafters.stored_head import tables
from worker.speculation.drafters.weights import settle
from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import DraftSource
from worker.vision.multimodal_merge import text_core

Seen = tuple[tuple[mx.array, mx.array], mx.array | None]
"""Keys and values of a kind of layer, and the mask over them."""


class Assistant:
    """An assistant, bound to its target."""

    def __init__(self, model: Any, target: Any, layers: Mapping[str, int], vocab: int) -> None:
        """`layers` are those of the target whose KV it sees, by their kind. Raises ValueError where it does not fit."""
        if not isinstance(model, Gemma4AssistantDraftModel):
            raise ValueError(f"drafters of the form {type(model).__module__.split('.')[-2]} are not run")
        self._model: Any = model
        self._vocab = vocab
        self.layers = dict(layers)
        self.window = int(self._model.config.text_config.sliding_window)
        core = text_core(target)
        kinds = {layer.layer_type for layer in self._model.model.layers}
        if missing := sorted(kinds - set(layers)):
            raise ValueError(f"it needs keys and values of layers of the kind {missing[0]}, which the target lacks")
        size = core.norm.weight.shape[0]
        if size != model.config.backbone_hidden_size:
            raise ValueError(f"it is for states of {model.config.backbone_hidden_size}, and the target's have {size}")
        self._embed, _ = tables(target)
        self.tokens = int(self._embed.weight.shape[0])
        self._scale = float(core.embed_scale)
        self._final = core.norm
        self._kinds = kinds

    @classmethod
    def load(
        cls, path: Path, target: Any, layers: Mapping[str, int], vocab: int, dtype: mx.Dtype
    ) -> tuple["Assistant", int]:
        """The assistant of a folder, and the bytes of its weights. Raises what mlx-vlm raises, and ValueError."""
        model: Any
        model, _ = load_drafter(str(path))
        own_bytes = settle(model, dtype)
        return cls(model, target, layers, vocab), own_bytes

    def hidden(self, states: mx.array) -> mx.array:
        """Of what was tapped, the target's last norm is still to come."""
        return self._final(states)

    def seen(self, caches: Sequence[Any]) -> dict[str, Seen]:
        """The target's keys and values, and what of them a row sees from its last position."""
        kinds: dict[str, Seen] = {}
        for kind in self._kinds:
            keys, values, positions = caches[self.layers[kind]].contents()
            if positions is None:
                kinds[kind] = (keys, values), None
                continue
            is_seen = positions >= 0
            if kind == "sliding_attention":
                last = mx.max(positions, axis=1, keepdims=True)
                is_seen = is_seen & (positions > last - self.window)
            kinds[kind] = (keys, values), is_seen[:, None, None]
        return kinds

    def __call__(
        self, tokens: mx.array, hidden: mx.array, seen: Mapping[str, Seen], offset: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Logits `[rows, vocab]` of what follows these tokens `[rows, 1]`, and the state that is fed next."""
        model = self._model
        state = model.pre_projection(mx.concatenate([self._embed(tokens) * self._scale, hidden], axis=-1))
        for layer in model.model.layers:
            shared, mask = seen[layer.layer_type]
            state, _, _ = layer(state, mask=mask, cache=None, per_layer_input=None, shared_kv=shared, offset=offset)
        state = model.model.norm(state)
        return as_wide(self._logits(state)[:, 0], self._vocab), model.post_projection(state)

    def _logits(self, state: mx.array) -> mx.array:
        model = self._model
        if model.masked_embedding is not None:
            # Only the tokens of the clusters that a state is near to are looked at.
            ids, own = model.masked_embedding._selected_logits(state, model.model.embed_tokens.weight)
            whole = mx.full((*state.shape[:2], model.masked_embedding.vocab_size), -mx.inf, dtype=own.dtype)
            return mx.put_along_axis(whole, ids.reshape(own.shape), own, axis=-1)
        table = model.model.embed_tokens.as_linear if model.config.tie_word_embeddings else model.lm_head
        return table(state)


class AssistantDrafts:
    """Proposer of a Gemma 4 with an assistant."""

    source: str = DraftSource.ASSISTANT
    longest = 7
    token_bytes = 0
    # It reads nothing: the target has.
    unread = 0

    def __init__(self, assistant: Assistant, taps: HiddenStateCapture) -> None:
        self._assistant = assistant
        self.taps = taps
        self._draw: Draw | None = None
        self._rows: Rows = lambda: ([], [])

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._draw, self._rows = draw, rows
        self.taps.is_on = True
        self.taps.clear()

    def end(self) -> None:
        self.taps.is_on = False
        self.taps.clear()

    @property
    def nbytes(self) -> int:
        return self.taps.nbytes

    def is_reading(self, row: DraftedRow) -> bool:
        return False

    def read(self, count: int) -> int:
        return 0

    def discard(self, row: DraftedRow) -> None:
        pass

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        assert self._draw is not None
        found = {row: self._state(row, len(text) - 1) for row, text in zip(rows, texts, strict=True)}
        states = {row: state for row, state in found.items() if state is not None}
        if not states:
            return [[] for _ in rows]
        # All rows of the batch, so that none of their KV is copied.
        order, caches = self._rows()
        some, following = next(iter(states.values())), dict(zip(rows, newest, strict=True))
        blank = mx.zeros_like(some)
        hidden = self._assistant.hidden(mx.stack([states.get(row, blank) for row in order])[:, None])
        tokens = mx.array([[following.get(row, 0)] for row in order], dtype=mx.uint32)
        seen, offset = self._assistant.seen(caches), caches[self._assistant.layers["full_attention"]].offset - 1
        drafted: list[mx.array] = []
        for ahead in range(count):
            known = mx.minimum(tokens, self._assistant.tokens - 1)
            logits, hidden = self._assistant(known, hidden, seen, offset)
            drafted.append(self._draw(order, logits, ahead))
            tokens = drafted[-1][:, None]
        columns: Any = mx.stack(drafted, axis=1).tolist()
        drafts = dict(zip(order, columns, strict=True))
        return [drafts[row] if row in states else [] for row in rows]

    def _state(self, row: DraftedRow, at: int) -> mx.array | None:
        """The target's state of the last known token of a row."""
        for record in reversed(self.taps.records):
            if row.draft in record.rows:
                index = record.rows.index(row.draft)
                place = at - record.starts[index]
                if 0 <= place < record.lengths[index]:
                    return record.states[index, record.begins[index] + place]
        return None
