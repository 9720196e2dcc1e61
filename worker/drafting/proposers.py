"""Proposers of drafts for a model, made when it is loaded."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from protocol.failures import Code
from worker.cache import batched
from worker.cache.kv import leaves
from worker.drafting.head_drafts import HeadDrafts
from worker.drafting.model_drafts import ModelDrafts
from worker.drafting.stored_head import NoHead, load_head
from worker.drafting.taps import Tap, Taps
from worker.errors import LoadFailed
from worker.model.lanes import Lane
from worker.model.loader import Loaded
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


def attach_model(target: Loaded, draft: Loaded) -> ModelDrafts:
    """Drafts by a second model. Raises `LoadFailed` where they cannot be verified, or be of use."""
    if target.plan.lane is not Lane.TOGETHER or not batched.can_rewind(make_prompt_cache(target.model)):
        raise _refused(
            draft, f"{target.path.name} cannot verify drafts: {target.plan.reason or 'its caches keep no tokens'}"
        )
    if any(type(leaf) is not KVCache for leaf in leaves(make_prompt_cache(draft.model))):
        raise _refused(draft, "its caches cannot go back by some tokens, as a sliding window or a recurrent state")
    if draft.plan.lane is not Lane.TOGETHER:
        raise _refused(draft, f"it cannot run several rows at once: {draft.plan.reason}")
    _check_tokens(target, draft)
    # The width of the target's logits; nothing is computed.
    vocab = target.model(mx.array([[0]]), cache=make_prompt_cache(target.model)).shape[-1]
    return ModelDrafts(draft.model, vocab)


def _check_tokens(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft model whose ids mean other tokens."""
    ours, theirs = ({id: token for token, id in each.tokenizer.get_vocab().items()} for each in (target, draft))
    for id, token in sorted(ours.items()):
        if theirs.get(id) != token:
            other = repr(theirs[id]) if id in theirs else "none"
            raise _refused(draft, f"token {id} is {token!r} in {target.path.name} and {other} there")


def _refused(draft: Loaded, reason: str) -> LoadFailed:
    return LoadFailed(Code.BAD_CONFIG, f"{draft.path} cannot draft for this model: {reason}")


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
