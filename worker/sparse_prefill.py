"""Sparse prefill: the model runs only those tokens of a long prompt that are important to a smaller model.

Selected tokens of a prompt, which a sparse prefill runs at their own positions.

Tokens are selected in blocks: a forward pass runs consecutive tokens, and a few of them cost as much as many.

Query capture: the queries of a model's attention, captured at the output of its rotary embeddings.

mlx-lm's attention modules apply a module named `rope` to their queries, then to their keys. This module is wrapped
once; without a listener the wrapper behaves exactly like the module.

Importance of a prompt's tokens: the attention that a smaller model pays them when it continues the prompt.

The method follows SpecPrefill (arXiv:2502.02789): the model reads the prompt and generates a few tokens; the attention
of their queries is averaged over neighbouring tokens, then the maximum over heads and layers is taken, then the mean
over queries. The model runs greedily, without other rows, and in chunks whose size depends on their position. So each
reading of a prompt gives the same importance, in this worker or another.

Chooser of the prompt tokens to keep: the smaller model reads one prompt at a time, within the time limit of a
tick.
"""

import hashlib
import math
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from protocol.failures import Code
from protocol.stats import Stats
from worker.errors import LoadFailed
from worker.kv import batched, ragged
from worker.model.loader import LoadedModel
from worker.vision.multimodal_merge import WrappedModule, text_core

BLOCK_TOKENS: Final = 128
# Number of first blocks that are always kept, because the first tokens absorb surplus attention (attention sink).
HEAD_BLOCKS: Final = 1
# Number of last blocks that are always kept, because the last tokens are the question.
TAIL_BLOCKS: Final = 5


class SelectedTokens:
    """Ordered, separate runs `[begin, end)` of a prompt's tokens; the first begins at 0, the last ends the prompt."""

    __slots__ = ("_offsets", "_slots", "count", "runs")

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self.runs = tuple(runs)
        lengths = [end - begin for begin, end in self.runs]
        self.count = sum(lengths)
        self._slots = [0, *accumulate(lengths[:-1])]
        self._offsets = [begin - slot for (begin, _), slot in zip(self.runs, self._slots, strict=True)]

    @property
    def leading(self) -> int:
        """Number of tokens before the first gap; the KV of these tokens is the same as in a full prefill."""
        return self.runs[0][1]

    def position_offset(self, slot: int) -> int:
        """Return the position of the token in a slot, minus the slot; slots after the prompt are allowed."""
        return self._offsets[bisect_right(self._slots, slot) - 1]

    def segments(self, tokens: npt.NDArray[np.int32], reused: int) -> list[list[int]]:
        """Return the selected tokens of `tokens`, which are prompt and output, by runs; the first `reused` are
        omitted."""
        ends = [end for _, end in self.runs[:-1]]
        runs = zip((begin for begin, _ in self.runs), [*ends, len(tokens)], strict=True)
        parts: list[Any] = [tokens[max(begin, reused) : end].tolist() for begin, end in runs]
        return [part for part in parts if part]


def count_kept(tokens: int, part: float) -> int:
    """Return how many of a prompt's tokens are kept."""
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    return tokens - (blocks - _blocks_kept(blocks, part)) * BLOCK_TOKENS


def choose(importance: npt.NDArray[np.float32], part: float) -> SelectedTokens:
    """Keep the blocks whose tokens have the highest mean importance; earlier blocks come first if several are equal."""
    tokens = len(importance)
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    always = {*range(HEAD_BLOCKS), *range(max(0, blocks - TAIL_BLOCKS), blocks)}
    means = [float(importance[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS].mean()) for at in range(blocks)]
    best = sorted(set(range(blocks)) - always, key=lambda at: (-means[at], at))
    chosen = sorted([*always, *best[: max(0, _blocks_kept(blocks, part) - len(always))]])
    runs: list[tuple[int, int]] = []
    for at in chosen:
        begin, end = at * BLOCK_TOKENS, min(tokens, (at + 1) * BLOCK_TOKENS)
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return SelectedTokens(runs)


def _blocks_kept(blocks: int, part: float) -> int:
    return min(blocks, max(math.ceil(part * blocks), HEAD_BLOCKS + TAIL_BLOCKS))


class QueryCapture:
    """Captured queries of a pass by layer, `[1, heads, tokens, dim]`, and the scale of each layer's attention."""

    def __init__(self) -> None:
        self._is_on = False
        self.scales: dict[int, float] = {}
        self._seen: dict[int, mx.array] = {}

    @contextmanager
    def listen(self) -> Generator[dict[int, mx.array]]:
        """Capture the queries of the pass that runs inside this context, by layer."""
        self._seen, self._is_on = {}, True
        try:
            yield self._seen
        finally:
            self._seen, self._is_on = {}, False

    def see(self, layer: int, rotated: mx.array) -> None:
        """Store the first output of a layer, which is its queries; the keys follow."""
        if self._is_on:
            self._seen.setdefault(layer, rotated)


class _CapturedRope(WrappedModule):
    """Rotary embedding that passes its results to the capture."""

    def __init__(self, module: Any, capture: QueryCapture, layer: int) -> None:
        super().__init__(module)
        self._capture = capture
        self._layer = layer

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        rotated: mx.array = self.module(x, *args, **kwargs)
        self._capture.see(self._layer, rotated)
        return rotated


def capture_queries(model: Any) -> QueryCapture:
    """Return the query capture of a model, installed once; empty if the model's modules have other forms."""
    capture: QueryCapture | None = getattr(model, "query_capture", None)
    if capture is None:
        capture = model.query_capture = QueryCapture()
        layers: list[Any] = getattr(text_core(model), "layers", [])
        for at, layer in enumerate(layers):
            owners = [module for module in layer.modules() if isinstance(module.get("rope"), nn.Module)]
            if len(owners) == 1:
                owner = owners[0]
                owner.rope = _CapturedRope(owner.rope, capture, at)
                capture.scales[at] = float(getattr(owner, "scale", 0.0))
    return capture


# Number of tokens whose queries count: the last token of the prompt, and all generated tokens except the last.
LOOKAHEAD_TOKENS: Final = 8
# Width of the window over which a token's attention is averaged.
POOL_TOKENS: Final = 13
# Maximum number of tokens in a chunk.
CHUNK_TOKENS: Final = 512 if ragged.sees_room else 256
# Maximum number of products of queries and keys in a chunk, so that all chunks take about the same time.
PRODUCTS_PER_CHUNK: Final = 1 << 24 if ragged.sees_room else 1 << 21
MIN_CHUNK_TOKENS: Final = 16


class PromptReading:
    """Reading of one prompt by a model: call `step` until `is_complete`."""

    def __init__(self, model: Any, capture: QueryCapture, prompt: list[int]) -> None:
        self._model = model
        self._capture = capture
        self._ids = prompt
        self._caches = batched.merge([make_prompt_cache(model)])
        self._done = 0
        self._sum = mx.zeros((len(self._ids),))
        self._left = LOOKAHEAD_TOKENS

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    @property
    def importance(self) -> npt.NDArray[np.float32]:
        """Importance of each token of the prompt, once the reading is complete."""
        return np.array(self._sum)

    def step(self) -> None:
        """Run one forward pass: of a chunk of the prompt, or of one of the tokens whose queries count."""
        last = len(self._ids) - 1
        if self._done < last:
            chunk = self._ids[self._done : min(last, self._done + chunk_at(self._done))]
            self._run(chunk)
            mx.eval([cache.state for cache in self._caches])
            return
        with self._capture.listen() as queries:
            logits = self._run(self._ids[-1:])
        self._sum = self._sum + self._attention(queries)
        mx.eval(self._sum, [cache.state for cache in self._caches])
        self._left -= 1
        # The generated token replaces the last id as the next input.
        token: Any = mx.argmax(logits[0, -1]).item()
        self._ids[-1] = token

    def _run(self, chunk: list[int]) -> mx.array:
        width = ragged.wide(len(chunk))
        batched.begin_block(self._caches, [len(chunk)], width)
        logits: mx.array = self._model(mx.array([[*chunk, *[0] * (width - len(chunk))]]), cache=self._caches)
        batched.rewind(self._caches, [width - len(chunk)])
        self._done += len(chunk)
        return logits

    def _attention(self, queries: dict[int, mx.array]) -> mx.array:
        """Return, for each token of the prompt, the largest attention share of any head."""
        most: mx.array | None = None
        for layer, query in queries.items():
            shares = _shares(query, self._caches[layer].keys, self._capture.scales[layer], len(self._ids))
            most = shares if most is None else mx.maximum(most, shares)
        assert most is not None
        return most


class ImportanceReader:
    """Model that reads prompts to compute importance. Raises `LoadFailed` if its attention cannot be captured."""

    def __init__(self, draft: LoadedModel) -> None:
        self._model = draft.model
        self._vocab_size = draft.vocab_size
        self._capture = capture_queries(draft.model)
        if reason := self._problem():
            raise LoadFailed(Code.BAD_CONFIG, f"{draft.path} cannot choose tokens for a sparse prefill: {reason}")
        caches = self._probe([0])[1]
        self.token_bytes = sum(int(array[..., :1, :].nbytes) for cache in caches for array in cache.arrays)

    def read(self, prompt: npt.NDArray[np.int32]) -> PromptReading:
        """Begin to read a prompt. Ids beyond the model's vocabulary are replaced by its last id."""
        return PromptReading(self._model, self._capture, np.minimum(prompt, self._vocab_size - 1).tolist())

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of KV that a prompt of `tokens` tokens takes once it is read."""
        return self.token_bytes * ragged.room(tokens + LOOKAHEAD_TOKENS)

    def _probe(self, ids: list[int]) -> tuple[dict[int, mx.array], list[Any]]:
        caches = batched.merge([make_prompt_cache(self._model)])
        with self._capture.listen() as queries:
            self._model(mx.array([ids]), cache=caches)
        return dict(queries), caches

    def _problem(self) -> str:
        """Return the reason why attention cannot be captured; empty if it can."""
        try:
            queries, caches = self._probe([0, 1, 2])
            keys = {layer: caches[layer].keys[..., :3, :] for layer in queries}
        except Exception as error:  # code of any architecture may raise any error
            return f"{type(error).__name__}: {error}"
        if not queries:
            return "its attention has no module named rope that turns its queries"
        for layer, query in queries.items():
            key, scale = keys[layer], self._capture.scales[layer]
            fits = query.shape[-1] == key.shape[-1] and query.shape[1] % key.shape[1] == 0
            if scale <= 0 or query.ndim != 4 or not fits:
                return f"the queries of its layer {layer} do not fit its keys"
            if query.shape == key.shape and mx.array_equal(query, key):
                return f"the queries of its layer {layer} are its keys"
        return ""


def chunk_at(done: int) -> int:
    """Return the size of the chunk after `done` tokens."""
    size = CHUNK_TOKENS
    while size > MIN_CHUNK_TOKENS and size * (done + size) > PRODUCTS_PER_CHUNK:
        size //= 2
    return size


def _shares(query: mx.array, keys: mx.array, scale: float, tokens: int) -> mx.array:
    """Return each token's largest share of a query head's attention, averaged over neighbouring tokens."""
    heads, size, groups = query.shape[1], query.shape[-1], keys.shape[1]
    query = (query * scale).reshape(groups, heads // groups, size)
    shares = mx.softmax(query @ keys[0, :, :tokens].swapaxes(-1, -2), axis=-1, precise=True)
    kernel = mx.full((1, POOL_TOKENS, 1), 1 / POOL_TOKENS)
    pooled = mx.conv1d(shares.reshape(heads, tokens, 1).astype(mx.float32), kernel, padding=POOL_TOKENS // 2)
    return pooled[..., 0].max(axis=0)


# Maximum number of cached choices, which serve requests with several answers and repeated requests.
_MAX_CACHED_CHOICES: Final = 64

_Key = tuple[bytes, float, str]


@dataclass(slots=True)
class _CurrentPrompt:
    """Prompt that the smaller model currently reads; `rid` is the first request that needs it."""

    rid: int
    key: _Key
    reading: PromptReading
    nbytes: int


class Chooser:
    """Chooser owned by the engine thread. `kept` requests the choice for a prompt, `step` continues reading."""

    def __init__(self, reader: ImportanceReader, stream: Any) -> None:
        self._reader = reader
        self._stream = stream
        self._current: _CurrentPrompt | None = None
        self._known: OrderedDict[_Key, SelectedTokens] = OrderedDict()
        self.counts = Stats()

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the current prompt takes once it is read completely."""
        return self._current.nbytes if self._current is not None else 0

    def needs(self, tokens: int) -> int:
        """Return the bytes of KV for reading the current prompt, or a prompt of `tokens` tokens if there is none."""
        return self.nbytes or self._reader.nbytes(tokens)

    def longest(self, budget: int) -> int:
        """Return the length of the longest prompt that can be read within `budget` bytes."""
        return budget // self._reader.token_bytes

    def kept(self, rid: int, prompt: npt.NDArray[np.int32], part: float, salt: str) -> SelectedTokens | None:
        """Return the tokens of a prompt to keep; None while they are being chosen, or while another prompt is read.

        Choices are cached separately for each salt, so that timing reveals nothing about other prompts.
        """
        if self._current is not None:
            return None
        key = hashlib.blake2b(prompt.tobytes()).digest(), part, salt
        kept = self._known.get(key)
        if kept is not None:
            self._known.move_to_end(key)
            self._count(len(prompt), kept)
        else:
            with mx.stream(self._stream):
                self._current = _CurrentPrompt(rid, key, self._reader.read(prompt), self._reader.nbytes(len(prompt)))
        return kept

    def step(self, limit_s: float) -> None:
        """Continue reading for about `limit_s` seconds, with at least one forward pass."""
        began = now = time.perf_counter()
        with mx.stream(self._stream):
            while self._current is not None:
                self._current.reading.step()
                if self._current.reading.is_complete:
                    self._learn(self._current)
                    self._current = None
                before, now = now, time.perf_counter()
                if 2 * now - before - began > limit_s:  # the next pass would probably exceed the limit
                    break
        self.counts.sparse_read_s += now - began

    def forget(self, rid: int) -> None:
        """Stop reading for a request that is no longer waiting."""
        if self._current is not None and self._current.rid == rid:
            self._current = None

    def drop(self) -> int | None:
        """Cancel the reading; return the rid of its request, if any."""
        current, self._current = self._current, None
        return current.rid if current is not None else None

    def _learn(self, current: _CurrentPrompt) -> None:
        self._known[current.key] = choose(current.reading.importance, current.key[1])
        while len(self._known) > _MAX_CACHED_CHOICES:
            self._known.popitem(last=False)

    def _count(self, tokens: int, kept: SelectedTokens) -> None:
        self.counts.sparse_prompts += 1
        self.counts.sparse_prompt_tokens += tokens
        self.counts.sparse_kept_tokens += kept.count
