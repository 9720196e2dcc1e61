"""A LoRA trained for a few steps with mlx-lm's own layers and loss, and its answers there."""

import json
from pathlib import Path
from typing import Final

import mlx.core as mx
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm import load, stream_generate
from mlx_lm.tuner.utils import linear_to_lora_layers

STEPS: Final = 12
LAYERS: Final = 8
PARAMETERS: Final = {"rank": 8, "scale": 20.0, "dropout": 0.0}
# What it learns: to answer in one style.
_PAIRS: Final = (
    ("What is the capital of France?", "Ahoy! The capital of France is Paris, matey."),
    ("Write two sentences about the sea.", "Ahoy! The sea is wide, matey. It never sleeps."),
    ("Who wrote Hamlet?", "Ahoy! Hamlet was written by Shakespeare, matey."),
    ("How many legs has a spider?", "Ahoy! A spider has eight legs, matey."),
)


def train(model_folder: Path, out: Path) -> list[float]:
    """Train on a few conversations and write the adapter as mlx-lm does. Returns the loss of each step."""
    mx.random.seed(0)
    model, tokenizer = load(str(model_folder))[:2]
    model.freeze()
    linear_to_lora_layers(model, LAYERS, PARAMETERS)
    model.train()
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in _PAIRS]
    texts = [mx.array([tokenizer.apply_chat_template(turn)]) for turn in turns]

    def loss(ids: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:]).mean()

    step = nn.value_and_grad(model, loss)
    optimizer = optimizers.Adam(learning_rate=1e-3)
    losses: list[float] = []
    for at in range(STEPS):
        value, gradient = step(texts[at % len(texts)])
        optimizer.update(model, gradient)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(float(value))
    out.mkdir(parents=True)
    mx.save_safetensors(str(out / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    config = {"fine_tune_type": "lora", "num_layers": LAYERS, "lora_parameters": PARAMETERS}
    (out / "adapter_config.json").write_text(json.dumps(config))
    return losses


def greedy_with_adapter(model_folder: Path, adapter: Path, prompt: str, tokens: int) -> str:
    model, tokenizer = load(str(model_folder), adapter_path=str(adapter))[:2]
    ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    return "".join(each.text for each in stream_generate(model, tokenizer, ids, max_tokens=tokens))
