"""Factory of a model's proposer of drafts, used when the model is loaded."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from protocol.failures import Code
from worker.errors import LoadFailed, foreign_code
from worker.kv import batched
from worker.kv.quantized import make_caches
from worker.kv.spans_and_checkpoints import leaves
from worker.model.batch_mode import BatchMode
from worker.model.checkpoint_view import checkpoint_view, files_of
from worker.model.loader import LoadedModel, check_weights, folded_config, read_json
from worker.speculation.drafter import Proposer
from worker.speculation.drafters.model_drafts import ModelDrafts
from worker.speculation.drafters.mtp_and_eagle_heads import ALONE, EagleHead, NoHead, load_head
from worker.speculation.drafters.state_drafts import HeadDrafts
from worker.speculation.drafters.target import CapturePoint, HiddenStateCapture, core_of, evaluate_weights
from worker.speculation.text_sources import DraftSource
from worker.vision.multimodal_merge import text_core

# Parts of model types and class names that identify a drafter that is no language model.
_DRAFTER_SIGNS: Final = ("mtp", "dflash", "dspark", "assistant", "eagle")


def attach_head(path: Path, model: Any, beside: Path | None = None) -> tuple[HeadDrafts, int]:
    """Attach a head to the model loaded from the checkpoint `path`; return its proposer and the bytes of its weights.

    The head is in the folder `beside` if given, otherwise in the checkpoint. Raises `NoHead`.
    """
    if not batched.can_rewind(make_prompt_cache(model)):
        raise NoHead("")
    head = load_head(path, folded_config(read_json(path / "config.json")), model, beside)
    core = core_of(model)
    dtype = core.norm.weight.dtype
    own_bytes = evaluate_weights(head, dtype)
    drafts = HeadDrafts(head, dtype)
    _capture(model, [len(core.layers)], drafts.capture)
    return drafts, own_bytes


def attach_draft(target: LoadedModel, path: Path, load_draft: Callable[[], LoadedModel]) -> tuple[Proposer, int]:
    """Attach the configured drafter or draft model; return its proposer and the bytes of its weights.

    Raises `LoadFailed` if the target cannot verify drafts, or the drafter was made for another model.
    """
    if target.plan.mode is not BatchMode.TOGETHER or not batched.can_rewind(make_prompt_cache(target.model)):
        reason = target.plan.reason or "its caches cannot go back to before a block"
        raise _refused(path, f"{target.path.name} cannot verify drafts: {reason}")
    match _kind(read_json(path / "config.json")):
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
            try:
                check_weights(path, files_of)
            except LoadFailed as error:
                raise _refused(path, str(error)) from error
            with (
                foreign_code(lambda error: _refused(path, f"{type(error).__name__}: {error}")),
                checkpoint_view(path, {}) as view,
            ):
                return attach(target.model, view)


def _kind(config: Mapping[str, Any]) -> str:
    """Return the type of a drafter; empty for a language model."""
    kind = str(config.get("speculators_model_type") or config.get("model_type", "")).lower()
    names = [kind, *(str(name).lower() for name in config.get("architectures") or ())]
    if "dflash_config" in config:
        names.append("dflash")
    return next((name for name in names if any(sign in name for sign in _DRAFTER_SIGNS)), "")


def _eagle_drafts(model: Any, path: Path) -> tuple[Proposer, int]:
    dtype = text_core(model).norm.weight.dtype
    head, own_bytes = EagleHead.load(path, model, _vocab(model), dtype)
    drafts = HeadDrafts(head, dtype, DraftSource.EAGLE)
    _capture(model, head.places, drafts.capture)
    return drafts, own_bytes


def _block_drafts(model: Any, path: Path) -> tuple[Proposer, int]:
    # These modules import mlx-vlm, which takes a second.
    from worker.speculation.drafters.block_head import BlockDrafts, BlockHead

    norm = text_core(model).norm.weight
    head, own_bytes = BlockHead.load(path, model, _vocab(model), norm.dtype)
    drafts = BlockDrafts(head, norm.shape[0], norm.dtype)
    _capture(model, head.places, drafts.capture)
    return drafts, own_bytes


def _assistant_drafts(model: Any, path: Path) -> tuple[Proposer, int]:
    from worker.speculation.drafters.assistant_drafts import Assistant, AssistantDrafts

    core, caches = text_core(model), make_caches(model)
    if any(type(cache) not in (KVCache, RotatingKVCache) for cache in caches):
        raise ValueError("it reads the target's KV, which is quantized, or of another kind")
    # The assistant uses the last layer of each attention type, among the layers that have KV of their own.
    layers = {str(layer.layer_type): at for at, layer in enumerate(core.layers[: len(caches)])}
    assistant, own_bytes = Assistant.load(path, model, layers, _vocab(model), core.norm.weight.dtype)
    drafts = AssistantDrafts(assistant)
    _capture(model, [len(core.layers)], drafts.capture)
    return drafts, own_bytes


# Function that attaches a drafter, by the drafter's types.
_ATTACHED: Final[Mapping[tuple[str, ...], Callable[[Any, Path], tuple[Proposer, int]]]] = {
    ("eagle3",): _eagle_drafts,
    ("dflash", "dspark", "muse_glimmer_assistant"): _block_drafts,
    ("gemma4_assistant", "gemma4_unified_assistant"): _assistant_drafts,
}


def _model_drafts(target: LoadedModel, draft: LoadedModel) -> ModelDrafts:
    if any(type(leaf) is not KVCache for leaf in leaves(make_prompt_cache(draft.model))):
        raise _refused(draft.path, "its caches cannot go back by some tokens: a sliding window, or a recurrent state")
    if draft.plan.mode is not BatchMode.TOGETHER:
        raise _refused(draft.path, f"it cannot run several rows at once: {draft.plan.reason}")
    _check_tokens(target, draft)
    return ModelDrafts(draft.model, draft.vocab_size, _vocab(target.model))


def _vocab(model: Any) -> int:
    """Return the width of a model's logits, from a graph that is built and never evaluated."""
    return model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]


def _capture(model: Any, places: Sequence[int], capture: HiddenStateCapture) -> None:
    """Capture the inputs of the layers `places`; the index after the last layer selects the last norm."""
    core = core_of(model)
    for place in places:
        if place == len(core.layers):
            core.norm = CapturePoint(core.norm, capture, place)
        else:
            core.layers[place] = CapturePoint(core.layers[place], capture, place)
    model.capture = capture


def _check_tokens(target: LoadedModel, draft: LoadedModel) -> None:
    """Refuse a draft model whose tokenizer gives an id of the target another meaning."""
    ours, theirs = ({id: token for token, id in each.tokenizer.get_vocab().items()} for each in (target, draft))
    for id, token in sorted(ours.items()):
        if theirs.get(id) != token:
            other = repr(theirs[id]) if id in theirs else "none"
            raise _refused(draft.path, f"token {id} is {token!r} in {target.path.name} and {other} there")


def _refused(path: Path, reason: str) -> LoadFailed:
    return LoadFailed(Code.BAD_CONFIG, f"{path} cannot draft for this model: {reason}")
