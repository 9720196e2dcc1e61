"""Proposers of drafts for a model, made when it is loaded."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from worker.cache import batched
from worker.drafting.head_drafts import HeadDrafts
from worker.drafting.stored_head import NoHead, load_head
from worker.drafting.taps import Tap, Taps
from worker.vision.graft import text_core


def attach_head(path: Path, model: Any) -> tuple[HeadDrafts, int]:
    """Drafts by the head of a checkpoint, for the model loaded from it, and the bytes of its weights.

    Raises `NoHead`.
    """
    if not batched.can_rewind(make_prompt_cache(model)):
        raise NoHead("")
    head = load_head(path, json.loads((path / "config.json").read_text()), model)
    core = text_core(model)
    final = getattr(core, "norm", None)
    if final is None:
        raise NoHead("the target has no norm before its head where one is looked for")
    dtype = final.weight.dtype
    if dtype == mx.float32:
        head.apply(_to_float32)
    mx.eval(head.parameters())
    taps = Taps()
    drafts = HeadDrafts(head, taps, final, dtype)
    core.norm = Tap(final, taps, len(core.layers))
    model.taps = taps
    weights: Any = tree_flatten(head.parameters())
    return drafts, sum(int(array.nbytes) for _, array in weights)


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
