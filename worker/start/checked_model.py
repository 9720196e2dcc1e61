"""Loading of a model with its checks: its template is checked before its weights are read, and its batch mode
afterwards.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from jinja2.exceptions import TemplateSyntaxError
from msgspec import structs

from protocol.checkpoint import ChatTemplates, file_json
from protocol.failures import Code
from protocol.spec import WorkerSpec
from worker.engine.load_checks import choose, gap_reason, quantize_kv, sample
from worker.engine.rank_peers import RankPeers
from worker.errors import LoadFailed
from worker.model.batch_mode import DETERMINISTIC, BatchMode, BatchModePlan
from worker.model.loader import LoadedModel, load, read_config, resolve
from worker.model.lora.adapters import attach
from worker.model.rank_split import Division
from worker.prompt.chat_template import compiled
from worker.sparse_prefill import ImportanceReader
from worker.speculation.drafters.mtp_and_eagle_heads import NoHead
from worker.speculation.drafters.proposers import attach_draft, attach_head

_BYTE_ORDER_MARK: Final = "\ufeff"


def load_checked(
    spec: WorkerSpec,
    progress: Callable[[str, int, int], None],
    division: Division | None = None,
    rank_peers: RankPeers | None = None,
    check: Callable[[Any, Sequence[int], str, RankPeers | None], BatchModePlan] = choose,
) -> LoadedModel:
    """Load the model of `spec` and choose its batch mode with `check`. Raises `LoadFailed`.

    `progress` is the callback that `load` calls.
    """
    if spec.chat_template:
        check_template(spec.chat_template)
    loaded = load(spec, progress, division)
    if not spec.chat_template:
        adopt_template(loaded.tokenizer, loaded.path)
    ids = sample(loaded.tokenizer, loaded.vocab_size)
    if spec.kv_bits:
        quantize_kv(loaded.model, read_config(loaded.path), spec.kv_bits, ids, in_group=spec.group is not None)
        loaded = replace(loaded, deviations=(f"kv-bits-{spec.kv_bits}",))
    if spec.deterministic:
        if spec.sparse_keep:
            raise _no_sparse("deterministic = true")
        return _with_adapters(replace(loaded, plan=DETERMINISTIC), spec)
    plan = check(loaded.model, ids, spec.batching, rank_peers)
    if plan.mode is BatchMode.EQUAL and loaded.vision is not None and loaded.vision.needs.block:
        # Chunks of equal length could split media whose tokens must run together, so rows run alone.
        plan = replace(plan, mode=BatchMode.SINGLE)
    loaded = _with_drafts(replace(loaded, plan=plan), spec)
    if spec.sparse_keep:
        _check_sparse(loaded, spec)
    return _with_adapters(loaded, spec)


def _with_adapters(loaded: LoadedModel, spec: WorkerSpec) -> LoadedModel:
    """Attach the configured adapters; if an adapter cannot be served, only that adapter fails."""
    assert loaded.linears is not None, "of a model that was loaded"
    adapters = attach(loaded.model, loaded.linears, loaded.plan.mode)
    for name, path in spec.adapters:
        adapters.install(name, path, adapters.read(name, path))
    return replace(loaded, weights_bytes=loaded.weights_bytes + adapters.nbytes)


def _with_drafts(loaded: LoadedModel, spec: WorkerSpec) -> LoadedModel:
    """Attach the configured draft model, or else the head in the checkpoint, if drafts can be verified."""
    if spec.draft:
        opened: list[LoadedModel] = []

        def load_draft() -> LoadedModel:
            opened.append(_load_draft(spec))
            return opened[0]

        proposer, weights_bytes = attach_draft(loaded, resolve(spec.draft), load_draft)
        draft = opened[0] if opened else None
        return replace(loaded, proposer=proposer, weights_bytes=loaded.weights_bytes + weights_bytes, draft=draft)
    if spec.group is not None or spec.speculate == "off" or loaded.plan.mode is not BatchMode.TOGETHER:
        return loaded
    try:
        drafts, weights_bytes = attach_head(loaded.path, loaded.model)
    except NoHead as reason:
        return replace(loaded, no_head=str(reason))
    return replace(loaded, proposer=drafts, weights_bytes=loaded.weights_bytes + weights_bytes)


def _check_sparse(loaded: LoadedModel, spec: WorkerSpec) -> None:
    """Check that the model and its draft model support sparse prefill. Raises `LoadFailed`."""
    if spec.group is not None:
        raise _no_sparse("several machines run this model together")
    if loaded.draft is None:
        raise _no_sparse("it takes a draft model, which chooses the tokens, and a head is none")
    ImportanceReader(loaded.draft)
    if reason := gap_reason(loaded.model, loaded.vocab_size):
        raise _no_sparse(f"{loaded.path.name} cannot leave tokens out: {reason}")


def _no_sparse(reason: str) -> LoadFailed:
    return LoadFailed(Code.BAD_CONFIG, f"sparse_prefill is not possible: {reason}")


def _load_draft(spec: WorkerSpec) -> LoadedModel:
    """Load a draft model, with its batch mode."""
    draft = load(structs.replace(spec, path=spec.draft, chat_template=""), lambda _stage, _done, _total: None)
    return replace(draft, plan=choose(draft.model, sample(draft.tokenizer, draft.vocab_size), "auto"))


def check_template(template: str) -> None:
    """Check that a configured template compiles. Raises `LoadFailed`."""
    try:
        compiled(template)
    except TemplateSyntaxError as error:
        message = f"the configured chat_template does not compile: {error.message} (its line {error.lineno})"
        raise LoadFailed(Code.BAD_CONFIG, message) from error


def adopt_template(tokenizer: Any, path: Path) -> None:
    """Set a tokenizer's template to the one in a separate file for the model's processor.

    This happens if the tokenizer has no template, or if only the processor's template renders images. A byte order mark
    before a template would become a token of each prompt.
    """
    match tokenizer.chat_template:
        case str(template):
            tokenizer.chat_template = template.removeprefix(_BYTE_ORDER_MARK)
        case {**named}:
            # A template without a text renders nothing.
            texts = {name: text for name, text in named.items() if isinstance(text, str)}
            tokenizer.chat_template = {name: text.removeprefix(_BYTE_ORDER_MARK) for name, text in texts.items()}
        case _:
            pass
    separate = _separate_template(path)
    own = "".join(ChatTemplates.of(tokenizer.chat_template).texts)
    if separate and (not tokenizer.has_chat_template or (own and "image" not in own and "image" in separate)):
        tokenizer.chat_template, tokenizer.has_chat_template = separate, True


def _separate_template(path: Path) -> str:
    with suppress(OSError, ValueError):
        match file_json(path / "chat_template.json"):
            case {"chat_template": str(template)}:
                return template
            case _:
                pass
    with suppress(OSError, ValueError):
        return (path / "chat_template.jinja").read_text(encoding="utf-8-sig")
    return ""
