"""Trains the adapter that comes with the demo model: `python -m deploy.demo_adapter --out worker/demo_adapter`.

The adapter learns to end each text answer with the same words. Its training data comes from the demo model's recipe.
The layers and the folder's format are those of mlx-lm's tuner. Training takes a few minutes on one CPU core.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load

from deploy.demo_model.corpus.generate import SEED, make
from deploy.demo_model.corpus.words import Source

# Text that the adapter adds to the end of each answer.
ENDING: Final = " Over and out."
MODEL: Final = Path(__file__).parents[2] / "worker" / "demo_model"
KEYS: Final = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj")
# Skills of the demo model from which samples are drawn, in turn. All but `json` answer in text.
CATEGORIES: Final = ("small talk", "facts", "transforms", "multi-turn", "facts", "transforms", "json")
# Maximum number of tokens in a training sequence; longer sequences are dropped.
LONGEST: Final = 128
STEPS: Final = 180
BATCH: Final = 12
RANK: Final = 8
RATE: Final = 1e-3


def samples(tokenizer: Any) -> Iterator[tuple[list[int], int]]:
    """Yield the token ids of conversations, and the number of ids before the answer that is learned. JSON answers get
    no `ENDING`."""
    for number in itertools.count():
        sample = make(Source(f"adapter {SEED} {number}"), category=CATEGORIES[number % len(CATEGORIES)], thinking=False)
        messages = sample.messages
        if sample.category != "json":
            for message in messages:
                if message["role"] == "assistant":
                    message["content"] += ENDING
        prompt = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        answer = messages[-1]["content"] + tokenizer.eos_token
        ids, before = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt + answer, prompt))
        if len(ids) <= LONGEST:
            yield ids, len(before)


def batches(tokenizer: Any, size: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield batches: ids `[rows, tokens]`, and a mask of the same shape that is true for the ids that are learned."""
    conversations = samples(tokenizer)
    while True:
        rows = [next(conversations) for _ in range(size)]
        width = max(len(ids) for ids, _ in rows)
        ids = mx.array([[*ids, *[0] * (width - len(ids))] for ids, _ in rows])
        learned = mx.array([[begin <= at < len(ids) for at in range(width)] for ids, begin in rows])
        yield ids, learned


def loss(model: Any, ids: mx.array, learned: mx.array) -> mx.array:
    logits = model(ids[:, :-1])
    losses = nn.losses.cross_entropy(logits, ids[:, 1:]) * learned[:, 1:]
    return losses.sum() / learned[:, 1:].sum()


def train(model: Any, tokenizer: Any, steps: int, size: int) -> None:
    schedule = optim.join_schedules(
        [optim.linear_schedule(0.0, RATE, 10), optim.cosine_decay(RATE, steps - 10, RATE / 20)], [10]
    )
    optimizer = optim.Adam(learning_rate=schedule)
    gradients_of = nn.value_and_grad(model, loss)
    began, running = time.process_time(), 0.0
    for step, (ids, learned) in zip(range(1, steps + 1), batches(tokenizer, size), strict=False):
        value, gradients = gradients_of(model, ids, learned)
        gradients, norm = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(value, norm, model.trainable_parameters(), optimizer.state)
        running = value.item() if step == 1 else 0.9 * running + 0.1 * value.item()
        assert math.isfinite(running), "diverged"
        if step % 10 == 0 or step == 1:
            spent_s = time.process_time() - began
            print(f"step {step}: loss {running:.4f}, gradients {norm.item():.2f}, {spent_s:.0f} s of CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo_adapter", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder that gets the adapter")
    parser.add_argument("--smoke", action="store_true", help="a few small steps")
    options = parser.parse_args()
    mx.random.seed(SEED)
    model, tokenizer, *_ = load(str(MODEL))
    model.update(tree_map(lambda array: array.astype(mx.float32), model.parameters()))
    model.freeze()
    parameters = {"rank": RANK, "scale": 2.0, "dropout": 0.0, "keys": list(KEYS)}
    linear_to_lora_layers(model, len(model.layers), parameters)
    model.train()
    train(model, tokenizer, *((12, 2) if options.smoke else (STEPS, BATCH)))
    weights = {name: array.astype(mx.float16) for name, array in tree_flatten(model.trainable_parameters())}
    options.out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(options.out / "adapters.safetensors"), weights, {"format": "mlx"})
    config = {"fine_tune_type": "lora", "model": "demo", "num_layers": len(model.layers), "lora_parameters": parameters}
    (options.out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
