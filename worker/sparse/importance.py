"""Importance of a prompt's tokens: the attention that a smaller model pays them when it continues the prompt.

The method follows SpecPrefill (arXiv:2502.02789): the model reads the prompt and generates a few tokens; the attention
of their queries is averaged over neighbouring tokens, then the maximum over heads and layers is taken, then the mean
over queries. The model runs greedily, without other rows, and in chunks whose size depends on their position. So each
reading of a prompt gives the same importance, in this worker or another.
"""

from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from protocol.failures import Code
from worker.errors import LoadFailed
from worker.kv import batched, ragged
from worker.model.loader import LoadedModel
from worker.sparse.query_capture import QueryCapture, capture_queries

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
