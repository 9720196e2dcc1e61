"""Proposers of drafts for a model, made when it is loaded."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from protocol.failures import Code
from worker.cache import batched
from worker.cache.kv import leaves
from worker.drafting.eagle_head import EagleHead
from worker.drafting.head_drafts import HeadDrafts
from worker.drafting.model_drafts import ModelDrafts
from worker.drafting.stored_head import NoHead, load_head
from worker.drafting.taps import Tap, Taps
from worker.errors import LoadFailed
from worker.model.lanes import Lane
from worker.model.loader import Loaded
from worker.speculation.drafter import Proposer
from worker.speculation.lookup import Source
from worker.vision.graft import text_core

# Signs of drafters that are not run, in the names of their types and classes.
_OTHERS: Final = ("mtp", "dflash", "dspark", "assistant", "eagle")


def attach_head(path: Path, model: Any, beside: Path | None = None) -> tuple[HeadDrafts, int]:
    """Drafts by the head of a checkpoint, or one in a folder of its own, for the model loaded from the checkpoint, and
    the bytes of its weights. Raises `NoHead`.
    """
    if not batched.can_rewind(make_prompt_cache(model)):
        raise NoHead("")
    head = load_head(path, _config(path), model, beside)
    core = text_core(model)
    dtype = core.norm.weight.dtype
    if dtype == mx.float32:
        head.apply(_to_float32)
    mx.eval(head.parameters())
    taps = _tapped(model, [len(core.layers)])
    return HeadDrafts(head, taps, dtype), _nbytes(head.parameters())


def attach_draft(target: Loaded, path: Path, load_draft: Callable[[], Loaded]) -> tuple[Proposer, int]:
    """Drafts by what the configuration names, a head, EAGLE-3 or a second model, and the bytes of its weights.

    Raises `LoadFailed` where drafts cannot be verified, or be of use.
    """
    if target.plan.lane is not Lane.TOGETHER or not batched.can_rewind(make_prompt_cache(target.model)):
        reason = target.plan.reason or "its caches cannot go back to before a block"
        raise _refused(path, f"{target.path.name} cannot verify drafts: {reason}")
    match _kind(_config(path)):
        case "":
            draft = load_draft()
            return _model_drafts(target, draft), draft.weights_bytes
        case "qwen3_5_mtp":
            try:
                return attach_head(target.path, target.model, path)
            except NoHead as reason:
                raise _refused(path, str(reason) or "it holds no head") from reason
        case "eagle3":
            return _eagle_drafts(target, path)
        case kind:
            raise _refused(path, f"drafters of the kind {kind} are not run")


def _kind(config: Mapping[str, Any]) -> str:
    """The kind of a drafter that is no language model; empty for one that is."""
    kind = str(config.get("speculators_model_type") or config.get("model_type", "")).lower()
    names = [kind, *(str(name).lower() for name in config.get("architectures") or ())]
    return next((name for name in names if any(sign in name for sign in _OTHERS)), "")


def _eagle_drafts(target: Loaded, path: Path) -> tuple[HeadDrafts, int]:
    model, core = target.model, text_core(target.model)
    try:
        head = EagleHead.load(path, model, _vocab(model))
        if not all(0 <= place < len(core.layers) for place in head.places):
            raise ValueError(f"it needs the layers {head.places} of a target that has {len(core.layers)}")
        drafts = HeadDrafts(head, Taps(), core.norm.weight.dtype, Source.EAGLE)
        width = core.norm.weight.shape[0] * len(head.places)
        mx.eval(head.hidden(mx.zeros((1, 1, width), core.norm.weight.dtype)), head.parameters)
    except Exception as error:  # the boundary to code of mlx-vlm, and to any file
        raise _refused(path, f"{type(error).__name__}: {error}") from error
    drafts.taps = _tapped(model, head.places)
    return drafts, _nbytes(head.parameters)


def _model_drafts(target: Loaded, draft: Loaded) -> ModelDrafts:
    if any(type(leaf) is not KVCache for leaf in leaves(make_prompt_cache(draft.model))):
        raise _refused(draft.path, "its caches cannot go back by some tokens: a sliding window, or a recurrent state")
    if draft.plan.lane is not Lane.TOGETHER:
        raise _refused(draft.path, f"it cannot run several rows at once: {draft.plan.reason}")
    _check_tokens(target, draft)
    return ModelDrafts(draft.model, draft.vocab_size, _vocab(target.model))


def _vocab(model: Any) -> int:
    """The width of a model's logits; nothing is computed."""
    return model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]


def _tapped(model: Any, places: Sequence[int]) -> Taps:
    """Taps of what goes into these layers, of which the one behind the last is the norm."""
    core, taps = text_core(model), Taps()
    for place in places:
        if place == len(core.layers):
            core.norm = Tap(core.norm, taps, place)
        else:
            core.layers[place] = Tap(core.layers[place], taps, place)
    model.taps = taps
    return taps


def _config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def _nbytes(parameters: Any) -> int:
    flat: Any = tree_flatten(parameters)
    return sum(int(array.nbytes) for _, array in flat)


def _check_tokens(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft model whose ids mean other tokens."""
    ours, theirs = ({id: token for token, id in each.tokenizer.get_vocab().items()} for each in (target, draft))
    for id, token in sorted(ours.items()):
        if theirs.get(id) != token:
            other = repr(theirs[id]) if id in theirs else "none"
            raise _refused(draft.path, f"token {id} is {token!r} in {target.path.name} and {other} there")


def _refused(path: Path, reason: str) -> LoadFailed:
    return LoadFailed(Code.BAD_CONFIG, f"{path} cannot draft for this model: {reason}")


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
