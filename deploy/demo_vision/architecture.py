"""Architecture of demo-vision: a Qwen3-VL whose text model is the demo model. Module names are those of
transformers."""

from dataclasses import dataclass
from typing import Final

import torch
from deploy.demo_model import training as text
from deploy.demo_model.training import IGNORED, rotate
from torch import Tensor, nn

from .rendering import MERGE, PATCH, SIDE

PIXELS: Final = 3 * PATCH * PATCH


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes of the vision tower, and settings of the training; the text model has the demo model's sizes."""

    depth: int = 4
    width: int = 128
    heads: int = 4
    ffn: int = 256
    deep: tuple[int, ...] = (1,)
    section: tuple[int, int, int] = (12, 10, 10)
    steps: int = 7690
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
    """Attention within each picture, in both directions."""
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
    """Merger of four patches into one token. The main merger normalizes before joining, those for deeper layers
    afterwards."""

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
        """Return the hidden states of all tokens, in a flat array. `slots` are the positions of the placeholders."""
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
    """Model and its loss as one module, so that both are compiled together."""

    def __init__(self, model: Qwen3VL) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, ids: Tensor, positions: Tensor, offsets: Tensor, slots: Tensor, pictures: list[Tensor], wanted: Tensor
    ) -> Tensor:
        logits = self.model.logits(self.model(ids, positions, offsets, slots, pictures))
        return nn.functional.cross_entropy(logits.float(), wanted, ignore_index=IGNORED)
