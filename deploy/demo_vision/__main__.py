"""Trains demo-vision, a small Qwen3-VL on the demo model's weights: `python -m deploy.demo_vision --out DIR`.

Training takes 17 minutes on one H200. Each step has text of the demo model's recipe beside conversations about
pictures, so that the text skills are kept. With `--smoke`, the same code runs on a CPU in two minutes.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import torch
from deploy.demo_model import training as text
from deploy.demo_model.training import Muon
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from .architecture import SMOKE, Loss, Qwen3VL, Recipe
from .batches import batches
from .rendering import MERGE, PATCH, SIDE, VOCABULARY, tokenizer_files, vocabulary
from .samples import SEED

DEMO: Final = Path(__file__).parents[2] / "worker" / "demo_model"


def begun(recipe: Recipe) -> Qwen3VL:
    """Return a model with a new vision tower and the demo model as its text model."""
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


def fit(model: Qwen3VL, bpe: Tokenizer, recipe: Recipe, device: str) -> None:
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
    for step, made in enumerate(batches(bpe, recipe, text.data_processes(device))):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(*made.tensors(device))
        loss.backward()
        nn.utils.clip_grad_norm_([*groups[False, False], *groups[True, False]], 1.0)
        now = min(1.0, (step + 1) / recipe.warmup, (1 - step / recipe.steps) / recipe.decay_share)
        for muon, peak in muons:
            muon.step(peak * now, recipe.weight_decay)
        for group in adam.param_groups:
            group["lr"] = group["peak"] * now
        adam.step()
        model.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == recipe.steps - 1:
            print(f"step {step}  loss {loss.item():.4f}  {time.monotonic() - began:.0f} s", flush=True)


def stored(weight: Tensor) -> Tensor:
    """Return a matrix as float16. Norms and biases stay float32, so that every product is computed in float32."""
    return weight.detach().cpu().to(torch.float16 if weight.ndim >= 2 else torch.float32).contiguous()


def save(model: Qwen3VL, bpe: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Write a folder that transformers, mlx-lm and mlx-vlm load."""
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
    parser = argparse.ArgumentParser(prog="python -m deploy.demo_vision", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets the model")
    parser.add_argument("--smoke", action="store_true", help="two small steps on a CPU")
    options = parser.parse_args()
    device = "cpu" if options.smoke else "cuda"
    recipe = SMOKE if options.smoke else Recipe()
    print(asdict(recipe), flush=True)
    bpe = vocabulary(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = begun(recipe).to(device)
    fit(model, bpe, recipe, device)
    save(model, bpe, recipe, options.out)


if __name__ == "__main__":
    main()
