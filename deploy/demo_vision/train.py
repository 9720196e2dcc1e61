"""Trains demo-vision: a small Qwen3-VL whose text model begins as the demo model's.

One CUDA GPU, some minutes: `python -m deploy.demo_vision.train --out DIR`. Each step has as much of the demo model's own text as
of conversations about pictures, so that text stays what it was. With `--smoke` the same code runs on a CPU in a minute.
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from deploy.demo_model.train import training as text
from deploy.demo_model.train.training import CONTEXT, IGNORED, Muon, rotate
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .questions import SEED, training_sample
from .rendering import MERGE, PATCH, SIDE, VOCABULARY, Rendered, places, rendered, tokenizer_files, vocabulary

DEMO: Final = Path(__file__).parents[2] / "worker" / "demo_model"
PIXELS: Final = 3 * PATCH * PATCH


@dataclass(frozen=True, slots=True)
class Recipe:
    """The shape of the tower and of the training; the text model's shape is the demo model's."""

    depth: int = 4
    width: int = 128
    heads: int = 4
    ffn: int = 256
    deep: tuple[int, ...] = (1,)
    section: tuple[int, int, int] = (12, 10, 10)
    steps: int = 12000
    text_tokens: int = 24576
    tokens: int = 49152
    patches: int = 131072
    images: int = 2048
    muon_lr: float = 0.008
    adam_lr: float = 0.0015
    tower_muon_lr: float = 0.02
    tower_adam_lr: float = 0.004
    weight_decay: float = 0.02
    warmup: int = 100
    decay_share: float = 0.7


SMOKE: Final = Recipe(steps=2, text_tokens=1024, tokens=1024, patches=2048, images=64, warmup=1)


# model: names as transformers' Qwen3-VL has them


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(width, ffn), "linear_fc2": nn.Linear(ffn, width)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        x = x + self.attn["proj"](see(rotate(q, cos, sin), rotate(k, cos, sin), v, offsets).flatten(1).to(x.dtype))
        return x + self.mlp["linear_fc2"](nn.functional.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh"))


def see(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Attention inside each picture, in both directions."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q.bfloat16(), k.bfloat16(), v.bfloat16(), offsets, offsets, SIDE * SIDE, SIDE * SIDE)
    parts = [
        nn.functional.scaled_dot_product_attention(*(t[a:b].transpose(0, 1) for t in (q, k, v))).transpose(0, 1)
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        if b > a
    ]
    return torch.cat(parts)


class Merger(nn.Module):
    """Four patches become one token. The main one normalises before it joins them, those for deeper layers after."""

    def __init__(self, width: int, out: int, *, after: bool) -> None:
        super().__init__()
        self.joined, self.after = width * MERGE**2, after
        self.norm = nn.LayerNorm(self.joined if after else width, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(self.joined, self.joined), nn.Linear(self.joined, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.joined)) if self.after else self.norm(x).view(-1, self.joined)
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x)))


class Tower(nn.Module):
    def __init__(self, recipe: Recipe, out: int) -> None:
        super().__init__()
        self.recipe = recipe
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(2 * PIXELS, recipe.width)})
        self.pos_embed = nn.Embedding(SIDE * SIDE, recipe.width)
        self.blocks = nn.ModuleList(Block(recipe.width, recipe.heads, recipe.ffn) for _ in range(recipe.depth))
        self.merger = Merger(recipe.width, out, after=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(recipe.width, out, after=True) for _ in recipe.deep)
        nn.init.normal_(self.pos_embed.weight, std=0.02)
        for last in (self.merger, *self.deepstack_merger_list):
            nn.init.normal_(last.linear_fc2.weight, std=0.01)
        half = recipe.width // recipe.heads // 2
        self.register_buffer("rates", 1 / 10000 ** (torch.arange(0, half, 2) / half), persistent=False)

    def forward(
        self, first: Tensor, second: Tensor, where: Tensor, index: Tensor, weight: Tensor, offsets: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        pixels = torch.stack([frame.view(-1, 3, PATCH * PATCH) for frame in (first, second)], 2).flatten(1)
        x = self.patch_embed["proj"]((pixels / 127.5 - 1).to(self.pos_embed.weight.dtype))
        x = x + (self.pos_embed(index) * weight[..., None]).sum(1).to(x.dtype)
        angles = (where[..., None] * self.rates).flatten(1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin, offsets)
            if number in self.recipe.deep:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return self.merger(x), deep


class Qwen3VL(nn.Module):
    def __init__(self, recipe: Recipe, language: text.Qwen3) -> None:
        super().__init__()
        self.recipe = recipe
        self.language_model = language
        shape = text.Recipe()
        self.visual = Tower(recipe, shape.hidden)
        self.register_buffer(
            "rates", 1 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim), persistent=False
        )
        axis = torch.zeros(shape.head_dim // 2, dtype=torch.long)
        for number in (1, 2):
            axis[number : 3 * recipe.section[number] : 3] = number
        self.register_buffer("axis", axis, persistent=False)

    def forward(self, ids: Tensor, positions: Tensor, offsets: Tensor, slots: Tensor, pictures: list[Tensor]) -> Tensor:
        """Hidden states of all tokens, flat. `slots` are the places of placeholders."""
        tokens, deep = self.visual(*pictures)
        angles = positions.T[:, self.axis] * self.rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = self.language_model.embed_tokens(ids)
        x = x.index_copy(0, slots, tokens.to(x.dtype))
        for number, layer in enumerate(self.language_model.layers):
            x = layer(x, cos, sin, offsets)
            if number < len(deep):
                x = x.index_add(0, slots, deep[number].to(x.dtype))
        return self.language_model.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.language_model.embed_tokens.weight.T


class Loss(nn.Module):
    """The model with its loss, compiled as one."""

    def __init__(self, model: Qwen3VL) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: Tensor, positions: Tensor, offsets: Tensor, slots: Tensor, pictures: list[Tensor], wanted: Tensor
    ) -> Tensor:
        logits = self.model.logits(self.model(ids, positions, offsets, slots, pictures))
        return nn.functional.cross_entropy(logits.float(), wanted, ignore_index=IGNORED)


# data


@dataclass(slots=True)
class Batch:
    """Arrays of fixed sizes: what was not filled belongs to a conversation and a picture of nobody."""

    ids: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray
    offsets: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    moving: np.ndarray  # patches of clips, whose second frame is another one
    second: np.ndarray
    where: np.ndarray
    index: np.ndarray
    weight: np.ndarray
    edges: np.ndarray

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], Tensor]:
        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        first = moved(self.first)
        second = first.clone()
        second[moved(self.moving)] = moved(self.second)
        pictures = [first, second]
        pictures += [moved(self.where).float(), moved(self.index).long(), moved(self.weight), moved(self.edges)]
        return (
            moved(self.ids),
            moved(self.positions),
            moved(self.offsets),
            moved(self.slots),
            pictures,
            moved(self.wanted),
        )


def packed(samples: Iterator[tuple[Rendered, np.ndarray]], recipe: Recipe, pad: int) -> tuple[Batch, int]:
    """Conversations side by side until one does not fit, and how many there are."""
    tokens, patches = recipe.tokens, recipe.patches
    # The last token is always nobody's: features of unused patches land there.
    out = Batch(
        np.full(tokens, pad, np.int64), np.zeros((3, tokens), np.int64), np.full(tokens, IGNORED, np.int64), np.zeros(0, np.int32), np.full(patches // MERGE**2, tokens - 1, np.int64),
        np.zeros((patches, PIXELS), np.uint8), np.zeros(0, np.int64), np.zeros((0, PIXELS), np.uint8), np.zeros((patches, 2), np.int16), np.zeros((patches, 4), np.int16), np.zeros((patches, 4), np.float32),
        np.zeros(0, np.int32),
    )  # fmt: skip
    offsets, edges, count = [0], [0], 0
    moving: list[tuple[int, np.ndarray]] = []
    for row, wanted in samples:
        begin, seen = offsets[-1], edges[-1]
        end, ends = begin + len(row.ids), seen + len(row.first)
        if end > tokens - 1 or ends > patches or len(edges) + len(row.grids) > recipe.images - patches // SIDE**2 - 2:
            break
        out.ids[begin:end], out.positions[:, begin:end], out.wanted[begin:end] = row.ids, row.positions, wanted
        out.slots[seen // MERGE**2 : ends // MERGE**2] = row.slots + begin
        out.first[seen:ends] = row.first
        if row.second is not row.first:
            moving.append((seen, row.second))
        at = seen
        for h, w in row.grids:
            span = slice(at, at + h * w)
            out.where[span], out.index[span], out.weight[span] = places(h, w)
            at += h * w
            edges.append(at)
        offsets.append(end)
        count += 1
    rest = [*range(edges[-1] + SIDE * SIDE, patches, SIDE * SIDE), patches]
    edges += [edge for edge in rest if edge > edges[-1]]
    spare = [*range(offsets[-1] + CONTEXT, tokens, CONTEXT), tokens]
    offsets += [end for end in spare if end > offsets[-1]]
    out.offsets = np.array(offsets, np.int32)
    if moving:
        out.moving = np.concatenate([np.arange(at, at + len(rows)) for at, rows in moving])
        out.second = np.concatenate([rows for _, rows in moving])
    # An empty picture at the end costs nothing, and makes the number of edges the same in all batches.
    out.edges = np.full(recipe.images, patches, np.int32)
    out.edges[: len(edges)] = edges
    return out, count


def _marks(bpe: Tokenizer) -> dict[str, int]:
    marks = {
        mark: bpe.token_to_id(mark) for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    }
    return marks | {"assistant": bpe.encode("<|im_start|>assistant\n").ids[1]}


def batch(bpe: Tokenizer, recipe: Recipe, number: int) -> Batch:
    """Batch `number`, always the same: text of the demo model's recipe, then conversations about pictures."""
    marks = _marks(bpe)

    def samples() -> Iterator[tuple[Rendered, np.ndarray]]:
        index = 0
        while True:
            row = rendered(bpe, training_sample(SEED, number, index))
            yield row, text.targets(row.ids, marks, last_only=False)
            index += 1

    seen, _ = packed(samples(), recipe, marks["<|endoftext|>"])
    plain = replace(text.Recipe(), batch_tokens=recipe.text_tokens)
    ids, wanted, offsets = text.batch(bpe, plain, 1_000_000 + number)
    lengths = np.diff(offsets)
    positions = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    slots = 4096
    both = np.full(slots, recipe.text_tokens + recipe.tokens, np.int32)
    joined = np.concatenate([offsets, seen.offsets[1:] + recipe.text_tokens])
    both[: len(joined)] = joined
    seen.ids = np.concatenate([ids, seen.ids])
    seen.positions = np.concatenate([np.broadcast_to(positions, (3, len(positions))), seen.positions], axis=1)
    seen.wanted = np.concatenate([wanted, seen.wanted])
    seen.slots = seen.slots + recipe.text_tokens
    seen.offsets = both
    return seen


_worker: dict[str, Any] = {}


def _start_worker(tokenizer_json: str, recipe: Recipe) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    _worker["bpe"], _worker["recipe"] = Tokenizer.from_str(tokenizer_json), recipe


def _make_batch(number: int) -> Batch:
    return batch(_worker["bpe"], _worker["recipe"], number)


def batches(bpe: Tokenizer, recipe: Recipe, workers: int) -> Iterator[Batch]:
    """All batches in order, made by other processes a little ahead of the training."""
    if workers == 0:
        yield from (batch(bpe, recipe, number) for number in range(recipe.steps))
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (bpe.to_str(), recipe)) as pool:
        ahead = [pool.apply_async(_make_batch, (number,)) for number in range(min(recipe.steps, 3 * workers))]
        for number in range(recipe.steps):
            yield ahead.pop(0).get()
            following = number + 3 * workers
            if following < recipe.steps:
                ahead.append(pool.apply_async(_make_batch, (following,)))


# run


def begun(recipe: Recipe) -> Qwen3VL:
    """A new tower before the demo model."""
    language = text.Qwen3(replace(text.Recipe(), vocabulary=VOCABULARY))
    weights = {
        name.removeprefix("model."): weight.float() for name, weight in load_file(DEMO / "model.safetensors").items()
    }
    old = weights["embed_tokens.weight"]
    new = language.embed_tokens.weight.detach().clone()
    new[: len(old)] = old
    language.load_state_dict(weights | {"embed_tokens.weight": new})
    return Qwen3VL(recipe, language)


def is_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and "embed" not in name


def fit(model: Qwen3VL, bpe: Tokenizer, recipe: Recipe, device: str, workers: int, limit_s: float) -> None:
    """Trains for `recipe.steps`, or as far as `limit_s` allows: the rate falls to zero by whichever comes first."""
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, weight in model.named_parameters():
        groups.setdefault((name.startswith("visual."), is_matrix(name, weight)), []).append(weight)
    muons = [(Muon(groups[False, True]), recipe.muon_lr), (Muon(groups[True, True]), recipe.tower_muon_lr)]
    adam = torch.optim.AdamW(
        [
            {"params": groups[False, False], "peak": recipe.adam_lr},
            {"params": groups[True, False], "peak": recipe.tower_adam_lr},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    loss_of = Loss(model)
    forward = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
    began = time.monotonic()
    for step, made in enumerate(batches(bpe, recipe, workers)):
        passed = time.monotonic() - began
        done = max(step / recipe.steps, passed / limit_s)
        if done >= 1:
            break
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(*made.tensors(device))
        loss.backward()
        nn.utils.clip_grad_norm_([*groups[False, False], *groups[True, False]], 1.0)
        now = min(1.0, (step + 1) / recipe.warmup, (1 - done) / recipe.decay_share)
        for muon, peak in muons:
            muon.step(peak * now, recipe.weight_decay)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * now
        adam.step()
        model.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == recipe.steps - 1:
            print(f"step {step}  loss {loss.item():.4f}  {time.monotonic() - began:.0f} s", flush=True)


def stored(weight: Tensor) -> Tensor:
    """Matrices as float16; norms and biases stay float32, which makes every product a float32 one."""
    return weight.detach().cpu().to(torch.float16 if weight.ndim >= 2 else torch.float32).contiguous()


def save(model: Qwen3VL, bpe: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Writes what transformers, mlx-lm and mlx-vlm load."""
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if name == "visual.patch_embed.proj.weight":
            weight = weight.view(recipe.width, 3, 2, PATCH, PATCH)
        weights[f"model.{name}"] = stored(weight)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer_files(bpe, folder)
    shape = text.Recipe()
    ids = {
        mark: bpe.token_to_id(mark)
        for mark in (
            "<|im_end|>",
            "<|endoftext|>",
            "<|image_pad|>",
            "<|video_pad|>",
            "<|vision_start|>",
            "<|vision_end|>",
        )
    }
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True, "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"], "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "dtype": "float16",
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": VOCABULARY, "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": shape.rope_theta,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": list(recipe.section)}, "max_position_embeddings": 32768, "tie_word_embeddings": True,
            "attention_bias": False, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None, "dtype": "float16",
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": recipe.depth, "hidden_size": recipe.width, "intermediate_size": recipe.ffn, "num_heads": recipe.heads, "in_channels": 3, "patch_size": PATCH,
            "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": shape.hidden, "num_position_embeddings": SIDE * SIDE, "deepstack_visual_indexes": list(recipe.deep),
            "hidden_act": "gelu_pytorch_tanh",
        },
    }  # fmt: skip
    processor = {
        "size": {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}, "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True, "do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "resample": 3,
    }  # fmt: skip
    documents = {
        "config.json": config,
        "generation_config.json": {"do_sample": False, "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"]},
        "preprocessor_config.json": processor | {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"},
        "video_preprocessor_config.json": processor
        | {
            "size": {"shortest_edge": 4 * 64 * 64, "longest_edge": 16 * 96 * 96}, "video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor", "fps": 2, "min_frames": 4, "max_frames": 16,
        },
    }  # fmt: skip
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    size = (folder / "model.safetensors").stat().st_size
    print(
        f"{sum(w.numel() for w in weights.values()) / 1e6:.2f}M parameters, {size / 1e6:.2f} MB in {folder}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="a few small steps on a CPU")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="end after this time, with the rate at zero")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that make data"
    )
    options = parser.parse_args()
    device = "cpu" if options.smoke else "cuda"
    recipe = SMOKE if options.smoke else Recipe()
    if options.steps:
        recipe = replace(recipe, steps=options.steps)
    print(asdict(recipe), flush=True)
    bpe = vocabulary(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = begun(recipe).to(device)
    fit(model, bpe, recipe, device, 0 if options.smoke else options.workers, options.limit_s)
    save(model, bpe, recipe, options.out)


if __name__ == "__main__":
    main()
