"""Training of the demo model: batches of conversations, Qwen3 in PyTorch, and the folder that mlx-lm loads."""

import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from deploy.demo_model.corpus.generate import SEED, training_sample

from . import tokenizer

CONTEXT: Final = 4096
IGNORED: Final = -100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes of the model, and settings of its training."""

    layers: int = 8
    hidden: int = 320
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 64
    ffn: int = 896
    vocabulary: int = tokenizer.VOCABULARY
    steps: int = 4000
    batch_tokens: int = 131072
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    weight_decay: float = 0.02
    warmup: int = 100
    decay_share: float = 0.6
    corpus_samples: int = 30000
    rope_theta: float = 1e6


SMOKE: Final = Recipe(
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    ffn=96,
    vocabulary=700,
    steps=4,
    batch_tokens=4096,
    warmup=1,
    corpus_samples=300,
)


# data


def corpus(count: int) -> Iterator[str]:
    renderer = tokenizer.Renderer()
    for index in range(count):
        yield renderer.conversation(training_sample(SEED, -1, index))


def targets(ids: np.ndarray, marks: dict[str, int], *, last_only: bool) -> np.ndarray:
    """Return the training target of each token: the next token if an assistant wrote it, otherwise `IGNORED`."""
    learned = np.zeros(len(ids), bool)
    starts = np.flatnonzero(ids == marks["<|im_start|>"])
    ends = np.flatnonzero(ids == marks["<|im_end|>"])
    for start, end in zip(starts, ends, strict=True):
        if ids[start + 1] != marks["assistant"] or (last_only and start != starts[-1]):
            continue
        begin = start + 3  # skips `<|im_start|>assistant\n`
        closing = begin + int(np.flatnonzero(ids[begin:end] == marks["</think>"])[0])
        if closing - begin == 2:  # the reasoning block is empty: the block and its blank line belong to the prompt
            begin = closing + 2
        learned[begin : end + 1] = True
    out = np.full(len(ids), IGNORED, np.int64)
    out[:-1][learned[1:]] = ids[1:][learned[1:]]
    return out


def batch(bpe: Tokenizer, recipe: Recipe, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return batch `number`, which is the same in every run: ids, targets, and the offsets where conversations
    begin."""
    renderer = tokenizer.Renderer()
    marks = {mark: bpe.token_to_id(mark) for mark in (*tokenizer.SPECIAL, *tokenizer.MARKS)}
    marks["assistant"] = bpe.encode("<|im_start|>assistant\n").ids[1]
    ids = np.full(recipe.batch_tokens, marks["<|endoftext|>"], np.int64)
    wanted = np.full(recipe.batch_tokens, IGNORED, np.int64)
    offsets = [0]
    index = 0
    while True:
        samples = [training_sample(SEED, number, index + i) for i in range(64)]
        index += 64
        encoded = bpe.encode_batch([renderer.conversation(sample) for sample in samples])
        for sample, encoding in zip(samples, encoded, strict=True):
            row = np.array(encoding.ids, np.int64)[:CONTEXT]
            if row[-1] != encoding.ids[-1]:
                continue  # the conversation is longer than the context
            if offsets[-1] + len(row) > recipe.batch_tokens:
                if recipe.batch_tokens > offsets[-1]:
                    offsets += range(offsets[-1] + CONTEXT, recipe.batch_tokens, CONTEXT)
                    offsets.append(recipe.batch_tokens)
                return ids, wanted, np.array(offsets, np.int32)
            at = slice(offsets[-1], offsets[-1] + len(row))
            ids[at], wanted[at] = row, targets(row, marks, last_only=sample.learn_last)
            offsets.append(offsets[-1] + len(row))


_worker: dict[str, Any] = {}


def _start_worker(tokenizer_json: str, recipe: Recipe) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker["bpe"], _worker["recipe"] = Tokenizer.from_str(tokenizer_json), recipe


def _make_batch(number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return batch(_worker["bpe"], _worker["recipe"], number)


def data_processes(device: str) -> int:
    """Return the number of processes that make data during training. With 0, the training makes its own data."""
    return max(1, (os.cpu_count() or 2) - 2) if device == "cuda" else 0


def batches(bpe: Tokenizer, recipe: Recipe, workers: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield all batches in order; other processes make them a little ahead of the training."""
    if workers == 0:
        yield from (batch(bpe, recipe, number) for number in range(recipe.steps))
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (bpe.to_str(), recipe)) as pool:
        ahead = [pool.apply_async(_make_batch, (number,)) for number in range(min(recipe.steps, 4 * workers))]
        for number in range(recipe.steps):
            yield ahead.pop(0).get()
            following = number + 4 * workers
            if following < recipe.steps:
                ahead.append(pool.apply_async(_make_batch, (following,)))


# model: Qwen3, with the names that transformers and mlx-lm give its weights


class Attention(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = recipe.heads, recipe.kv_heads, recipe.head_dim
        self.q_proj = nn.Linear(recipe.hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(recipe.hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(recipe.hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, recipe.hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor) -> Tensor:
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))), cos, sin)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return self.o_proj(attend(q, k, v.to(q.dtype), offsets).flatten(1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Causal attention within each conversation. The shapes of q, k and v are (tokens, heads, head_dim)."""
    if q.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q.bfloat16(), k.bfloat16(), v.bfloat16(), offsets, offsets, CONTEXT, CONTEXT, **CAUSAL)
    parts = [
        nn.functional.scaled_dot_product_attention(
            *(t[a:b].transpose(0, 1) for t in (q, k, v)), is_causal=True
        ).transpose(0, 1)
        for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        if b > a
    ]
    return torch.cat(parts)


def causal_arguments() -> dict[str, Any]:
    """Return the arguments that select causal attention in the installed version of torch."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}


CAUSAL: Final[dict[str, Any]] = causal_arguments() if torch.cuda.is_available() else {}


class Mlp(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(recipe.hidden, recipe.ffn, bias=False)
        self.up_proj = nn.Linear(recipe.hidden, recipe.ffn, bias=False)
        self.down_proj = nn.Linear(recipe.ffn, recipe.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(recipe.hidden, eps=1e-6)
        self.self_attn = Attention(recipe)
        self.post_attention_layernorm = nn.RMSNorm(recipe.hidden, eps=1e-6)
        self.mlp = Mlp(recipe)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, offsets)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(recipe.vocabulary, recipe.hidden)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(recipe.layers))
        self.norm = nn.RMSNorm(recipe.hidden, eps=1e-6)
        angles = torch.arange(CONTEXT)[:, None] / recipe.rope_theta ** (
            torch.arange(0, recipe.head_dim, 2) / recipe.head_dim
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    weight,
                    std=0.02 / math.sqrt(2 * recipe.layers)
                    if out
                    else 0.02
                    if "embed" in name
                    else weight.shape[1] ** -0.5 / 2,
                )

    def hidden(self, ids: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
        """Return the last hidden states. All arrays are flat; `offsets` separates the conversations."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, offsets)
        return self.norm(x)

    def forward(self, ids: Tensor, positions: Tensor, offsets: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean loss over the wanted tokens."""
        logits = self.hidden(ids, positions, offsets) @ self.embed_tokens.weight.T
        return nn.functional.cross_entropy(logits.float(), wanted, ignore_index=IGNORED)


# optimizer


class Muon:
    """Muon optimizer: momentum with an update orthogonalized by Newton-Schulz, for the layers' matrices, stacked by
    shape."""

    def __init__(self, weights: list[Tensor]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in weights:
            shapes.setdefault(weight.shape, []).append(weight)
        self.stacks = [
            (group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in shapes.items()
        ]

    @torch.no_grad()
    def step(self, lr: float, decay: float, momentum: float = 0.95) -> None:
        for weights, velocity in self.stacks:
            grads = torch.stack([weight.grad for weight in weights if weight.grad is not None])
            velocity.lerp_(grads, 1 - momentum)
            update = orthogonal(grads.lerp(velocity, momentum))
            scale = max(1, update.shape[1] / update.shape[2]) ** 0.5
            for weight, change in zip(weights, update, strict=True):
                weight.mul_(1 - lr * decay).add_(change, alpha=-lr * scale)


def orthogonal(stack: Tensor) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


def rate(step: int, recipe: Recipe) -> float:
    """Return the factor of the learning rate: it rises, stays constant, then falls linearly to zero."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    return min(1.0, (recipe.steps - step) / (recipe.decay_share * recipe.steps))


# run


def fit(model: Qwen3, bpe: Tokenizer, recipe: Recipe, device: str) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    forward = torch.compile(model, dynamic=False) if device == "cuda" else model
    slots = recipe.batch_tokens // 8 + 2
    began = time.monotonic()
    for step, (ids, wanted, offsets) in enumerate(batches(bpe, recipe, data_processes(device))):
        lengths = np.diff(offsets)
        positions = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
        padded = np.full(min(slots, 4096) if device == "cuda" else len(offsets), len(ids), np.int32)
        padded[: len(offsets)] = offsets
        inputs = [torch.from_numpy(array).to(device, non_blocking=True) for array in (ids, positions, padded, wanted)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        now = rate(step, recipe)
        muon.step(recipe.muon_lr * now, recipe.weight_decay)
        for group in adam.param_groups:
            group["lr"] = recipe.adam_lr * now
        adam.step()
        model.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == recipe.steps - 1:
            passed = time.monotonic() - began
            speed = (step + 1) * recipe.batch_tokens / passed / 1e3
            print(f"step {step}  loss {loss.item():.4f}  {passed:.0f} s  {speed:.0f}k tokens/s", flush=True)


def save(model: Qwen3, bpe: Tokenizer, recipe: Recipe, folder: Path) -> None:
    """Write a folder for mlx-lm. Matrices are float16; norms stay float32, so that every product is computed in
    float32."""
    tokenizer.save(bpe, folder)
    weights = {
        f"model.{name}": weight.detach().cpu().to(torch.float16 if weight.ndim == 2 else torch.float32).contiguous()
        for name, weight in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    end, pad = bpe.token_to_id("<|im_end|>"), bpe.token_to_id("<|endoftext|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.ffn,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": recipe.rope_theta,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    print(f"{sum(w.numel() for w in weights.values()) / 1e6:.2f}M parameters in {folder}", flush=True)


def train(folder: Path, recipe: Recipe, device: str) -> None:
    print(asdict(recipe), flush=True)
    bpe = tokenizer.train(corpus(recipe.corpus_samples), recipe.vocabulary)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model = Qwen3(recipe).to(device)
    fit(model, bpe, recipe, device)
    save(model, bpe, recipe, folder)
