"""Drafts by a Gemma 4 assistant, for the rows of a batch.

An assistant has no KV of its own: its few layers attend to the KV of the target's last layer of each attention type.
The first input of a draft is the target's last state and the token after it; each later input has the assistant's own
last state instead. The position is the same for all tokens of a draft.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.gemma4_assistant import Gemma4AssistantDraftModel

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Draw, Proposer, Rows
from worker.speculation.drafters.model_drafts import columns
from worker.speculation.drafters.target import HiddenStateCapture, evaluate_weights, tables, with_vocab
from worker.speculation.text_sources import DraftSource, Tokens
from worker.vision.multimodal_merge import text_core

Seen = tuple[tuple[mx.array, mx.array], mx.array | None]
"""Keys and values of a layer, and the mask over them."""


class Assistant:
    """Assistant model, bound to its target."""

    def __init__(self, model: Any, target: Any, layers: Mapping[str, int], vocab: int) -> None:
        """`layers` maps each attention type to the target's layer whose KV is used. Raises ValueError if the assistant
        was made for another model."""
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
        """Load the assistant in a folder; return it with the bytes of its weights. Raises ValueError and mlx-vlm's
        errors.
        """
        model: Any
        model, _ = load_drafter(str(path))
        own_bytes = evaluate_weights(model, dtype)
        return cls(model, target, layers, vocab), own_bytes

    def hidden(self, states: mx.array) -> mx.array:
        """Apply the target's last norm; states are captured before it."""
        return self._final(states)

    def seen(self, caches: Sequence[Any]) -> dict[str, Seen]:
        """Return the target's KV by attention type, with masks for a query at each row's last position."""
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
        """Return the logits `[rows, vocab]` after these tokens `[rows, 1]`, and the state to feed next."""
        model = self._model
        state = model.pre_projection(mx.concatenate([self._embed(tokens) * self._scale, hidden], axis=-1))
        for layer in model.model.layers:
            shared, mask = seen[layer.layer_type]
            state, _, _ = layer(state, mask=mask, cache=None, per_layer_input=None, shared_kv=shared, offset=offset)
        state = model.model.norm(state)
        return with_vocab(self._logits(state)[:, 0], self._vocab), model.post_projection(state)

    def _logits(self, state: mx.array) -> mx.array:
        model = self._model
        if model.masked_embedding is not None:
            # Only tokens in the clusters nearest to the state get logits; all others get -inf.
            ids, own = model.masked_embedding._selected_logits(state, model.model.embed_tokens.weight)
            whole = mx.full((*state.shape[:2], model.masked_embedding.vocab_size), -mx.inf, dtype=own.dtype)
            return mx.put_along_axis(whole, ids.reshape(own.shape), own, axis=-1)
        table = model.model.embed_tokens.as_linear if model.config.tie_word_embeddings else model.lm_head
        return table(state)


class AssistantDrafts(Proposer):
    """Proposer with a Gemma 4 assistant."""

    source: str = DraftSource.ASSISTANT

    def __init__(self, assistant: Assistant) -> None:
        self._assistant = assistant
        self.capture = HiddenStateCapture()
        self._draw: Draw
        self._rows: Rows

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._draw, self._rows = draw, rows
        self.capture.switch(is_on=True)

    def end(self) -> None:
        self.capture.switch(is_on=False)

    @property
    def nbytes(self) -> int:
        return self.capture.nbytes

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        last = {row: self._state(row, len(text) - 1) for row, text in zip(rows, texts, strict=True)}
        states = {row: state for row, state in last.items() if state is not None}
        if not states:
            return [[] for _ in rows]
        # All rows of the batch take part in the pass, even those without a draft, so that no KV is copied.
        order, caches = self._rows()
        blank, following = mx.zeros_like(next(iter(states.values()))), dict(zip(rows, newest, strict=True))
        hidden = self._assistant.hidden(mx.stack([states.get(row, blank) for row in order])[:, None])
        tokens = mx.array([[following.get(row, 0)] for row in order], dtype=mx.uint32)
        seen, offset = self._assistant.seen(caches), caches[self._assistant.layers["full_attention"]].offset - 1
        drafted: list[mx.array] = []
        for position in range(count):
            known = mx.minimum(tokens, self._assistant.tokens - 1)
            logits, hidden = self._assistant(known, hidden, seen, offset)
            drafted.append(self._draw(order, logits, position))
            tokens = drafted[-1][:, None]
        drafts = dict(zip(order, columns(drafted), strict=True))
        return [drafts[row] if row in states else [] for row in rows]

    def _state(self, row: DraftedRow, at: int) -> mx.array | None:
        """Return the target's state at token `at` of a row; None if it was not captured."""
        for record in reversed(self.capture.records):
            if row.draft in record.rows:
                index = record.rows.index(row.draft)
                place = at - record.starts[index]
                if 0 <= place < record.lengths[index]:
                    return record.states[index, record.begins[index] + place]
        return None
