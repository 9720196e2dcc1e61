"""Models, adapters, drafters and requests for features together: the smallest that have each of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from protocol.to_worker import Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support import vision_models
from tests.support.drafters import copying_assistant, copying_block, eagle, gemma4
from tests.support.engine import Result
from tests.support.fused import fused, random_adapter
from tests.support.heads import build_with_head, save_head
from tests.support.models import build
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.loader import read_config
from worker.sparse_prefill import BLOCK_TOKENS
from worker.tools.repack import repack
from worker.vision.checkpoint import fold, load_text_model

# Heads that KV can be quantized of.
HEAD = {"head_dim": 32}
FAMILIES = {"images": "qwen3_vl", "images for head": "qwen3_5", "images for assistant": "gemma4"}
MODELS = {"experts on disk": "experts", "assistant": "gemma"}
MROPE = {"rope_scaling": {"type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}}
TOKENS = 10
# Rows of a batch, by the adapter that each has where there are some.
ROWS = ("", "one", "two", "one", "")
LENGTHS = (9, 40, 23, 5, 61)
# Of these the tokens are others, so that what they are compared with has them too.
CHANGING = frozenset({"kv_bits", "sparse prefill"})
DRAFTERS = {"head": "", "draft model": "draft", "EAGLE-3": "eagle", "block": "block", "assistant": "assistant"}


@dataclass
class Models:
    """Folders of models, drafters and adapters, made when they are first asked for, and what their rows say alone."""

    root: Path
    _known: dict[str, Path] = field(default_factory=dict)
    alone: dict[Any, Result] = field(default_factory=dict)

    def folder(self, name: str) -> Path:
        if name not in self._known:
            self._known[name] = getattr(self, "_" + name.replace(" ", "_"))(self.root / name)
        return self._known[name]

    def adapter(self, name: str, model: str) -> Path:
        """One of the attention of a model, and one of other layers too."""
        key = f"{name} of {model}"
        if key not in self._known:
            modules = ("self_attn.q_proj", "self_attn.v_proj", *(["mlp.down_proj"] if name == "two" else []))
            self._known[key] = random_adapter(self.root / key, self.folder(model), len(self._known), modules)
        return self._known[key]

    def fused(self, name: str, model: str) -> Path:
        key = f"{name} in {model}"
        if key not in self._known:
            self._known[key] = fused(self.root / key, self.folder(model), self.adapter(name, model))
        return self._known[key]

    def _dense(self, folder: Path) -> Path:
        return build_with_head("qwen3", folder, **HEAD)

    def _experts(self, folder: Path) -> Path:
        return build("qwen3_moe", folder, num_experts=8, **HEAD)

    def _repacked(self, folder: Path) -> Path:
        repack(self.folder("experts"), folder, trust_remote_code=False, progress=lambda _text: None)
        return folder

    def _images(self, folder: Path) -> Path:
        folder.mkdir()
        return vision_models.build(FAMILIES["images"], folder, changes={"text_config": HEAD | MROPE})

    def _images_for_head(self, folder: Path) -> Path:
        folder.mkdir()
        vision_models.build(FAMILIES["images for head"], folder)
        config = read_config(folder)
        with checkpoint_view(folder, {CONFIG: fold(config)}) as view:
            text, _ = load_text_model(view, False)
        save_head(folder / "mtp.safetensors", text, 64, "mlx")
        return folder

    def _images_for_assistant(self, folder: Path) -> Path:
        folder.mkdir()
        return vision_models.build(FAMILIES["images for assistant"], folder)

    def _gemma(self, folder: Path) -> Path:
        return gemma4(folder)

    def _draft(self, folder: Path) -> Path:
        return build_with_head("qwen3", folder, damping=0.0, **HEAD)

    def _eagle(self, folder: Path) -> Path:
        return eagle(folder)

    def _block(self, folder: Path) -> Path:
        return copying_block(folder, self.folder("dense"), "dflash")

    def _assistant(self, folder: Path) -> Path:
        return copying_assistant(folder, self.folder("gemma"))


def model_of(features: frozenset[str]) -> str:
    if "images" in features:
        return next((f"images for {kind}" for kind in ("head", "assistant") if kind in features), "images")
    return next((model for feature, model in MODELS.items() if feature in features), "dense")


@dataclass
class Asked:
    """A request, and the images that its prompt has."""

    request: Generate
    images: vision_models.MediaPrompt | None = None


def asked(features: frozenset[str]) -> list[Asked]:
    """Greedy and seeded rows, whose texts repeat themselves; with what the features ask of a request."""
    rng = np.random.default_rng(5)
    rows: list[Asked] = []
    for rid, (name, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
        is_sparse = "sparse prefill" in features and rid == 1
        images = None
        ids = rng.integers(20, 420, length + (8 * BLOCK_TOKENS if is_sparse else 0)).tolist()
        if "images" in features and not is_sparse:
            family = FAMILIES[model_of(features)]
            images = vision_models.prompt(family, rid, [length, vision_models.image(family, rng, 4, 4), 12])
            ids = images.ids
        if rid == 4:  # what an adapter has read, the base reads too
            assert isinstance(rows[2].request.prompt, TokensPrompt)
            ids, images = [*rows[2].request.prompt.ids], rows[2].images
        elif images is None and not is_sparse:
            ids *= 3
        sampling = Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos="grammar" not in features)
        request = Generate(
            rid,
            TokensPrompt(tuple(ids)),
            sampling,
            max_tokens=2 * TOKENS if "preemption" in features else TOKENS,
            top_logprobs=1,
            adapter=name if "adapters" in features else "",
            sparse_keep=0.0 if is_sparse else None,
            echo="prompt scores" in features and "images" not in features,
            prompt_logprobs=2 if "prompt scores" in features else None,
            constraint=Constraint(ConstraintKind.REGEX, "([a-z]{2,5} ){9}") if "grammar" in features else None,
        )
        rows.append(Asked(request, images))
    return rows


def settings(features: frozenset[str], models: Models, model: str) -> dict[str, Any]:
    """Of a worker that has the features."""
    own: dict[str, Any] = {"cache_bytes": 0, "prefill_chunk": 64, "speculate": "off"}
    if features & {*DRAFTERS, "text drafts"}:
        own["speculate"] = "auto"
    if "adapters" in features:
        own["adapters"] = tuple((name, str(models.adapter(name, model))) for name in sorted(set(ROWS) - {""}))
    if "kv_bits" in features:
        own["kv_bits"] = 8
    if "sparse prefill" in features:
        own |= {"sparse_keep": 0.8, "sparse_from": 2 * BLOCK_TOKENS, "draft": str(models.folder("draft"))}
    for kind in features & DRAFTERS.keys():
        own |= {"draft": str(models.folder(DRAFTERS[kind]))} if DRAFTERS[kind] else {}
    if "experts on disk" in features:
        own |= {"experts": "disk", "expert_cache_bytes": 1, "max_running": 2}
    if "disk cache" in features:
        folder = models.root / "prefixes" / "+".join(sorted(features))
        own |= {"disk_cache_dir": str(folder), "disk_cache_bytes": 1 << 30, "disk_cache_tokens": 16}
        own["cache_bytes"] = 1 << 28
    return own
