"""Query capture: the queries of a model's attention, captured at the output of its rotary embeddings.

mlx-lm's attention modules apply a module named `rope` to their queries, then to their keys. This module is wrapped
once; without a listener the wrapper behaves exactly like the module.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.vision.multimodal_merge import WrappedModule, text_core


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
