"""Query capture: the queries of a model's attention, captured at the output of its rotary embeddings.

mlx-lm's attention modules apply a module named `rope` to their queries, then to their keys. It is wrapped once; without
a listener the wrapper behaves exactly like the module.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.vision.multimodal_merge import text_core


class QueryTaps:
    """Captured queries of a pass by layer, `[1, heads, tokens, dim]`, and the scale of each layer's attention."""

    def __init__(self) -> None:
        self._is_on = False
        self.scales: dict[int, float] = {}
        self._seen: dict[int, mx.array] = {}

    @contextmanager
    def listen(self) -> Generator[dict[int, mx.array]]:
        """Capture the queries of the pass inside, by layer."""
        self._seen, self._is_on = {}, True
        try:
            yield self._seen
        finally:
            self._seen, self._is_on = {}, False

    def see(self, layer: int, turned: mx.array) -> None:
        """Store a layer's first output, its queries; the keys follow."""
        if self._is_on:
            self._seen.setdefault(layer, turned)


class _Turning(nn.Module):
    """Rotary embedding that passes its results to the capture."""

    def __init__(self, module: Any, taps: QueryTaps, layer: int) -> None:
        super().__init__()
        self.module = module
        self._taps = taps
        self._layer = layer

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        turned: mx.array = self.module(x, *args, **kwargs)
        self._taps.see(self._layer, turned)
        return turned


def tap_queries(model: Any) -> QueryTaps:
    """Return the query capture of a model, installed once; empty if the model's modules have other forms."""
    taps: QueryTaps | None = getattr(model, "query_taps", None)
    if taps is None:
        taps = model.query_taps = QueryTaps()
        layers: list[Any] = getattr(text_core(model), "layers", [])
        for at, layer in enumerate(layers):
            owners = [module for module in layer.modules() if isinstance(module.get("rope"), nn.Module)]
            if len(owners) == 1:
                owner = owners[0]
                owner.rope = _Turning(owner.rope, taps, at)
                taps.scales[at] = float(getattr(owner, "scale", 0.0))
    return taps
