"""Measures demo-vision on held-out renderings, and prints a table with the share of correct answers per category.

`python -m deploy.demo_vision.evaluate DIR` reads weights as `train.py` writes them. An answer is correct if each of its
tokens is the most likely one after the correct tokens before it; greedy decoding then generates exactly this answer.
"""

import argparse
import json
from pathlib import Path
from typing import Final

import numpy as np
import torch
from deploy.demo_model.train.training import IGNORED, targets
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from .architecture import Qwen3VL, Recipe
from .batches import marks_of, packed
from .rendering import PATCH, VOCABULARY, rendered
from .samples import CATEGORIES, held_out_samples
from .train import DEMO, begun

# Minimum share of correct held-out renderings, by category.
WANTED: Final = {
    "described": 0.85,
    "shape": 0.95,
    "colour": 0.95,
    "count": 0.90,
    "position": 0.90,
    "digits": 0.95,
    "words": 0.85,
    "two pictures": 0.85,
    "motion": 0.85,
}


def loaded(folder: Path, recipe: Recipe, device: str) -> Qwen3VL:
    model = begun(recipe)
    weights = {
        name.removeprefix("model."): weight.float() for name, weight in load_file(folder / "model.safetensors").items()
    }
    weights["visual.patch_embed.proj.weight"] = weights["visual.patch_embed.proj.weight"].reshape(recipe.width, -1)
    assert weights["visual.patch_embed.proj.weight"].shape[1] == 2 * 3 * PATCH * PATCH
    model.load_state_dict(weights)
    return model.to(device).eval()


@torch.no_grad()
def right(model: Qwen3VL, bpe: Tokenizer, category: str, number: int, recipe: Recipe, device: str) -> list[bool]:
    marks = marks_of(bpe)
    rows = []
    for sample in held_out_samples(category, number):
        row = rendered(bpe, sample)
        rows.append((row, targets(row.ids, marks, last_only=True)))
    out: list[bool] = []
    while len(out) < len(rows):
        made, count = packed(iter(rows[len(out) :]), recipe, marks["<|endoftext|>"])
        ids, positions, offsets, slots, pictures, _ = made.tensors(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            guessed = model.logits(model(ids, positions, offsets, slots, pictures)).argmax(-1).cpu().numpy()
        for begin, end in zip(made.offsets[:count], made.offsets[1 : count + 1], strict=True):
            wanted = made.wanted[begin:end]
            out.append(bool(np.all((guessed[begin:end] == wanted) | (wanted == IGNORED))))
    return out


def export_text(folder: Path, out: Path) -> None:
    """Write only the text model, as a plain Qwen3 folder that the demo model's evaluation can read."""
    out.mkdir(parents=True, exist_ok=True)
    prefix = "model.language_model."
    weights = {
        name.replace(prefix, "model."): weight
        for name, weight in load_file(folder / "model.safetensors").items()
        if name.startswith(prefix)
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((DEMO / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (out / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (out / name).write_text((folder / name).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--export-text", type=Path, help="write the text model to this folder, for deploy.demo_model.evaluate --model"
    )
    parser.add_argument("--number", type=int, default=400, help="held-out samples of each category")
    options = parser.parse_args()
    if options.export_text:
        export_text(options.folder, options.export_text)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe = Recipe()
    bpe = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    model = loaded(options.folder, recipe, device)
    print("| held-out category | right | share | wanted |\n|---|---|---|---|")
    for category in CATEGORIES:
        verdicts = right(model, bpe, category, options.number, recipe, device)
        print(
            f"| {category} | {sum(verdicts)} of {len(verdicts)} | {sum(verdicts) / len(verdicts):.1%} | {WANTED[category]:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
