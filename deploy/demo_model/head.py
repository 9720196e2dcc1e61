"""Trains the demo model's head for multi-token prediction (MTP), one layer that drafts the next tokens.

At each position, the head gets the model's last hidden state and the embedding of the next token, and predicts the
token after that one. For the following token of a draft, it gets its own output in place of the model's state. The head
learns the model's distribution, not the text's: a draft is accepted if the model would sample the same token.
"""

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from deploy.demo_model.corpus.generate import SEED

from .training import IGNORED, Mlp, Muon, Qwen3, Recipe, batches, data_processes, rate, rotate

# Number of earlier tokens that the head attends to, in training and when it drafts.
WINDOW: Final = 256
# Weight in the loss of each token of a draft; training uses drafts of this many tokens.
WEIGHTS: Final = (1.0, 0.8, 0.6, 0.4)
STEPS: Final = 2400


# model


class Attention(nn.Module):
    """Attention of a draft's m-th token to the keys and values of the model's states, and to those of its own draft."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = recipe.heads, recipe.kv_heads, recipe.head_dim
        self.q_proj = nn.Linear(recipe.hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(recipe.hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(recipe.hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, recipe.hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=1e-6)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, conversation: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return attention outputs for `x`, both `(windows, slots, hidden)`. Keys and values are appended to `past`."""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))), cos, sin)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).to(k.dtype)
        groups = self.heads // self.kv_heads
        past.append((k.repeat_interleave(groups, 2).transpose(1, 2), v.repeat_interleave(groups, 2).transpose(1, 2)))
        step = len(past) - 1
        keys, values = past[0]
        slots = torch.arange(x.shape[1], device=x.device)
        sees = (slots[None, :] <= slots[:, None] - step) & (conversation[:, :, None] == conversation[:, None, :])
        if step == 0:
            sees = sees | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        scale = self.head_dim**-0.5
        scores = (q @ keys.transpose(-1, -2) * scale).float().masked_fill(~sees[:, None], -math.inf)
        # Keys and values of the draft itself: those of step i are `step - i` slots back.
        own = [tuple(part.roll(step - i, 2) for part in past[i]) for i in range(1, step + 1)]
        extra = [((q * keys).sum(-1, keepdim=True) * scale).float() for keys, _ in own]
        weights = torch.cat([scores, *extra], -1).softmax(-1).to(values.dtype)
        out = weights[..., : len(slots)] @ values
        for at, (_, each) in enumerate(own):
            out = out + weights[..., len(slots) + at, None] * each
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(recipe.hidden, eps=1e-6)
        self.self_attn = Attention(recipe)
        self.post_attention_layernorm = nn.RMSNorm(recipe.hidden, eps=1e-6)
        self.mlp = Mlp(recipe)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, conversation: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, conversation, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """Prediction head, with the weight names that Qwen's checkpoints use below `mtp`."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * recipe.hidden, recipe.hidden, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(recipe.hidden, eps=1e-6)
        self.pre_fc_norm_hidden = nn.RMSNorm(recipe.hidden, eps=1e-6)
        self.layers = nn.ModuleList([Layer(recipe)])
        self.norm = nn.RMSNorm(recipe.hidden, eps=1e-6)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.005 if is_out else weight.shape[1] ** -0.5 / 2)

    def forward(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, conversation: Tensor) -> list[Tensor]:
        """Return the head's states for each token of a draft, each `(windows, slots, hidden)`.

        The input of slot s is the hidden state s and the token s + 1. From step 1 on, the hidden state is replaced by
        the head's own state at slot s - 1 of the step before, because step m belongs to a draft that began m slots
        earlier.
        """
        states, past = list[Tensor](), list[tuple[Tensor, Tensor]]()
        embeds = self.pre_fc_norm_embedding(embeds)
        for _ in WEIGHTS:
            pair = torch.cat([embeds, self.pre_fc_norm_hidden(hidden)], -1)
            states.append(self.norm(self.layers[0](self.fc(pair), cos, sin, conversation, past)))
            hidden = states[-1].roll(1, 1)
        return states


# data


@dataclass(slots=True)
class Windows:
    """Batch cut into windows: the head's inputs, the model's probabilities as targets, and a mask of wanted tokens."""

    embeds: Tensor
    hidden: Tensor
    conversation: Tensor
    # `teacher` are the model's log-probabilities at each slot; `is_wanted` is true for tokens that an assistant wrote.
    teacher: Tensor
    is_wanted: Tensor

    def valid(self, step: int) -> Tensor:
        """Return which slots count: the token after next is an assistant's, in the conversation where the draft
        began."""
        wanted = self.is_wanted.roll(-1, 1) & (self.conversation.roll(-1, 1) == self.conversation.roll(step, 1))
        wanted[:, :step] = False
        wanted[:, -1] = False
        return wanted


@torch.no_grad()
def windows(model: Qwen3, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], device: str) -> Windows:
    ids, wanted, offsets = arrays
    lengths = np.diff(offsets)
    positions = np.arange(len(ids)) - np.repeat(offsets[:-1], lengths)
    number = np.repeat(np.arange(len(lengths)), lengths)
    flat = [torch.from_numpy(array).to(device) for array in (ids, positions, offsets, number, wanted)]
    hidden = model.hidden(*flat[:3])
    shape = (-1, WINDOW)
    following = flat[0].roll(-1).view(shape)
    return Windows(
        model.embed_tokens(following),
        hidden.view(*shape, hidden.shape[-1]).float(),
        flat[3].view(shape),
        (hidden @ model.embed_tokens.weight.T).float().log_softmax(-1).view(*shape, model.embed_tokens.num_embeddings),
        (flat[4] != IGNORED).view(shape),
    )


# run


def load(folder: Path) -> tuple[Qwen3, Tokenizer, Recipe]:
    """Load a model that this recipe has written."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    recipe = Recipe(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        steps=STEPS,
    )
    model = Qwen3(recipe)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return model.requires_grad_(False), Tokenizer.from_file(str(folder / "tokenizer.json")), recipe


def turns(model: Qwen3) -> tuple[Tensor, Tensor]:
    return model.cos[:WINDOW, None], model.sin[:WINDOW, None]


def loss_of(model: Qwen3, head: Head, batch: Windows) -> tuple[Tensor, list[float]]:
    """Return the weighted loss of all draft tokens, and the loss of each token of a draft."""
    total, each = torch.zeros((), device=batch.hidden.device), list[float]()
    for step, state in enumerate(head(batch.embeds, batch.hidden, *turns(model), batch.conversation)):
        valid = batch.valid(step)
        teacher = batch.teacher.roll(-1, 1)[valid]
        logits = (state[valid] @ model.embed_tokens.weight.T).float().log_softmax(-1)
        loss = (teacher.exp() * (teacher - logits)).sum(-1).mean()
        total = total + WEIGHTS[step] * loss
        each.append(loss.item())
    return total, each


def fit(model: Qwen3, head: Head, bpe: Tokenizer, recipe: Recipe, device: str) -> None:
    matrices = [weight for weight in head.parameters() if weight.ndim == 2]
    others = [weight for weight in head.parameters() if weight.ndim != 2]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    began = time.monotonic()
    for step, arrays in enumerate(batches(bpe, recipe, data_processes(device))):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, each = loss_of(model, head, windows(model, arrays, device))
        loss.backward()
        now = rate(step, recipe)
        muon.step(recipe.muon_lr * now, recipe.weight_decay)
        for group in adam.param_groups:
            group["lr"] = recipe.adam_lr * now
        adam.step()
        head.zero_grad(set_to_none=True)
        if step % 100 == 0 or step == recipe.steps - 1:
            passed = time.monotonic() - began
            print(f"step {step}  {' '.join(f'{value:.4f}' for value in each)}  {passed:.0f} s", flush=True)


def train(folder: Path, device: str) -> None:
    """Train the head of the model in `folder`, and write it there. On a CPU, take two small steps."""
    model, bpe, recipe = load(folder)
    if device == "cpu":
        recipe = replace(recipe, steps=2, batch_tokens=4 * WINDOW, warmup=1)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    model, head = model.to(device), Head(recipe).to(device)
    head.norm.load_state_dict(model.norm.state_dict())
    fit(model, head, bpe, recipe, device)
    weights = {
        f"mtp.{name}": weight.detach().cpu().to(torch.float16 if weight.ndim == 2 else torch.float32).contiguous()
        for name, weight in head.named_parameters()
    }
    save_file(weights, folder / "mtp.safetensors", {"format": "pt"})
    print(f"{sum(weight.numel() for weight in weights.values()) / 1e6:.2f}M parameters", flush=True)
