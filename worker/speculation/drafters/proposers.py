"""Proposers of drafts for a model, made when it is loaded."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from protocol.failures import Code
from worker.errors import LoadFailed, foreign_code
from worker.kv import batched
from worker.kv.kv import leaves
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.model.loader import LoadedModel
from worker.speculation.drafter import Proposer
from worker.speculation.drafters.cores import core_of
from worker.speculation.drafters.eagle_head import EagleHead
from worker.speculation.drafters.head_drafts import HeadDrafts
from worker.speculation.drafters.hidden_states import TAIL, CapturePoint, HiddenStateCapture
from worker.speculation.drafters.model_drafts import ModelDrafts
from worker.speculation.drafters.stored_head import ALONE, NoHead, load_head
from worker.speculation.drafters.weights import settle, size_bytes
from worker.speculation.text_sources.lookup import DraftSource
from worker.vision.multimodal_merge import text_core

# Signs of drafters that are not run, in the names of their types and classes.
_OTHERS: Final = ("mtp", "dflash", "dspark", "assistant", "eagle")


def attach_head(path: Path, model: Any, beside: Path | None = None) -> tuple[HeadDrafts, int]:
    """Drafts by the head of a checkpoint, or one in a folder of its own, for the model loaded from the checkpoint, and
    the bytes of its weights. Raises `NoHead`.
    """
    if not batched.can_rewind(make_prompt_cache(model)):
        raise NoHead("")
    head = load_head(path, _config(path), model, beside)
    core = core_of(model)
    dtype = core.norm.weight.dtype
    own_bytes = settle(head, dtype)
    return HeadDrafts(head, _tapped(model, [len(core.layers)]), dtype), own_bytes


def attach_draft(target: LoadedModel, path: Path, load_draft: Callable[[], LoadedModel]) -> tuple[Proposer, int]:
    """Drafts by what the configuration names, a drafter or a second model, and the bytes of its weights.

    Raises `LoadFailed` where drafts cannot be verified, or be of use.
    """
    if target.plan.lane is not BatchMode.TOGETHER or not batched.can_rewind(make_prompt_cache(target.model)):
        reason = target.plan.reason or "its caches cannot go back to before a block"
        raise _refused(path, f"{target.path.name} cannot verify drafts: {reason}")
    match _kind(_config(path)):
        case "":
            draft = load_draft()
            return _model_drafts(target, draft), draft.weights_bytes
        case kind if kind in ALONE:
            try:
                return attach_head(target.path, target.model, path)
            except NoHead as reason:
                raise _refused(path, str(reason) or "it holds no head") from reason
        case kind:
            attach = next((attach for signs, attach in _ATTACHED.items() if any(sign in kind for sign in signs)), None)
            if attach is None:
                raise _refused(path, f"drafters of the kind {kind} are not run")
            with foreign_code(lambda error: _refused(path, f"{type(error).__name__}: {error}")):
                return attach(target.model, path)


def _kind(config: Mapping[str, Any]) -> str:
    """The kind of a drafter that is no language model; empty for one that is."""
    kind = str(config.get("speculators_model_type") or config.get("model_type", "")).lower()
    names = [kind, *(str(name).lower() for name in config.get("architectures") or ())]
    if "dflash_config" in config:
        names.append("dflash")
    return next((name for name in names if any(sign in name for sign in _OTHERS)), "")


def _eagle_drafts(model: Any, path: Path) -> tuple[Proposer, int]:
    core = text_core(model)
    head = EagleHead.load(path, model, _vocab(model))
    if not all(0 <= place < len(core.layers) for place in head.places):
        raise ValueError(f"it needs the layers {head.places} of a target that has {len(core.layers)}")
    drafts = HeadDrafts(head, HiddenStateCapture(), core.norm.weight.dtype, DraftSource.EAGLE)
    width = core.norm.weight.shape[0] * len(head.places)
    mx.eval(head.hidden(mx.zeros((1, 1, width), core.norm.weight.dtype)), head.parameters)
    drafts.taps = _tapped(model, head.places)
    return drafts, size_bytes(head.parameters)


def _block_drafts(model: Any, path: Path) -> tuple[Proposer, int]:
    from worker.speculation.drafters.block_drafts import TAIL as BLOCK_TAIL  # mlx-vlm is loaded for those who need it
    from worker.speculation.drafters.block_drafts import BlockDrafts
    from worker.speculation.drafters.block_head import BlockHead

    core = text_core(model)
    dtype = core.norm.weight.dtype
    head, own_bytes = BlockHead.load(path, model, _vocab(model), dtype)
    drafts = BlockDrafts(head, HiddenStateCapture(), core.norm.weight.shape[0] * len(head.places), dtype)
    drafts.taps = _tapped(model, head.places, BLOCK_TAIL)
    return drafts, own_bytes


def _assistant_drafts(model: Any, path: Path) -> tuple[Proposer, int]:
    from worker.speculation.drafters.assistant_drafts import Assistant, AssistantDrafts

    core, caches = text_core(model), make_caches(model)
    if any(type(cache) not in (KVCache, RotatingKVCache) for cache in caches):
        raise ValueError("it reads the target's KV, which is quantized, or of another kind")
    # The newest of each kind that has keys and values of its own.
    layers = {str(layer.layer_type): at for at, layer in enumerate(core.layers[: len(caches)])}
    assistant, own_bytes = Assistant.load(path, model, layers, _vocab(model), core.norm.weight.dtype)
    return AssistantDrafts(assistant, _tapped(model, [len(core.layers)])), own_bytes


# Drafters by signs in their kinds.
_ATTACHED: Final[Mapping[tuple[str, ...], Callable[[Any, Path], tuple[Proposer, int]]]] = {
    ("eagle3",): _eagle_drafts,
    ("dflash", "dspark", "muse_glimmer_assistant"): _block_drafts,
    ("gemma4_assistant", "gemma4_unified_assistant"): _assistant_drafts,
}


def _model_drafts(target: LoadedModel, draft: LoadedModel) -> ModelDrafts:
    if any(type(leaf) is not KVCache for leaf in leaves(make_prompt_cache(draft.model))):
        raise _refused(draft.path, "its caches cannot go back by some tokens: a sliding window, or a recurrent state")
    if draft.plan.lane is not BatchMode.TOGETHER:
        raise _refused(draft.path, f"it cannot run several rows at once: {draft.plan.reason}")
    _check_tokens(target, draft)
    return ModelDrafts(draft.model, draft.vocab_size, _vocab(target.model))


def _vocab(model: Any) -> int:
    """The width of a model's logits; nothing is computed."""
    return model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]


def _tapped(model: Any, places: Sequence[int], tail: int = TAIL) -> HiddenStateCapture:
    """Taps of what goes into these layers, of which the one behind the last is the norm."""
    core, taps = core_of(model), HiddenStateCapture(tail)
    for place in places:
        if place == len(core.layers):
            core.norm = CapturePoint(core.norm, taps, place)
        else:
            core.layers[place] = CapturePoint(core.layers[place], taps, place)
    model.taps = taps
    return taps


def _config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def _check_tokens(target: LoadedModel, draft: LoadedModel) -> None:
    """Refuse a draft model whose ids mean other tokens."""
    ours, theirs = ({id: token for token, id in each.tokenizer.get_vocab().items()} for each in (target, draft))
    for id, token in sorted(ours.items()):
        if theirs.get(id) != token:
            other = repr(theirs[id]) if id in theirs else "none"
            raise _refused(draft.path, f"token {id} is {token!r} in {target.path.name} and {other} there")


def _refused(path: Path, reason: str) -> LoadFailed:
    return LoadFailed(Code.BAD_CONFIG, f"{path} cannot draft for this model: {reason}")
