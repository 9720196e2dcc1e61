"""Batches of training: conversations about pictures, packed side by side after text of the demo model's recipe."""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from deploy.demo_model import training as text
from deploy.demo_model.training import CONTEXT, IGNORED
from tokenizers import Tokenizer
from torch import Tensor

from .architecture import PIXELS, Recipe
from .rendering import MERGE, SIDE, Rendered, places, rendered
from .samples import SEED, training_sample


@dataclass(slots=True)
class Batch:
    """Batch as arrays of fixed sizes. Unused entries belong to padding conversations and padding pictures."""

    ids: np.ndarray
    positions: np.ndarray
    wanted: np.ndarray
    offsets: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    moving: np.ndarray  # indices of clips' patches, whose second frame differs from the first
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


def packed(samples: Iterator[tuple[Rendered, np.ndarray]], recipe: Recipe, pad: int) -> Batch:
    """Pack conversations side by side until one does not fit."""
    tokens, patches = recipe.tokens, recipe.patches
    # The last token is always padding: the features of unused patches are written to it.
    out = Batch(
        np.full(tokens, pad, np.int64), np.zeros((3, tokens), np.int64), np.full(tokens, IGNORED, np.int64), np.zeros(0, np.int32), np.full(patches // MERGE**2, tokens - 1, np.int64),
        np.zeros((patches, PIXELS), np.uint8), np.zeros(0, np.int64), np.zeros((0, PIXELS), np.uint8), np.zeros((patches, 2), np.int16), np.zeros((patches, 4), np.int16), np.zeros((patches, 4), np.float32),
        np.zeros(0, np.int32),
    )  # fmt: skip
    offsets, edges = [0], [0]
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
    rest = [*range(edges[-1] + SIDE * SIDE, patches, SIDE * SIDE), patches]
    edges += [edge for edge in rest if edge > edges[-1]]
    spare = [*range(offsets[-1] + CONTEXT, tokens, CONTEXT), tokens]
    offsets += [end for end in spare if end > offsets[-1]]
    out.offsets = np.array(offsets, np.int32)
    if moving:
        out.moving = np.concatenate([np.arange(at, at + len(rows)) for at, rows in moving])
        out.second = np.concatenate([rows for _, rows in moving])
    # Empty pictures at the end cost nothing, and give all batches the same number of edges.
    out.edges = np.full(recipe.images, patches, np.int32)
    out.edges[: len(edges)] = edges
    return out


def marks_of(bpe: Tokenizer) -> dict[str, int]:
    marks = {
        mark: bpe.token_to_id(mark) for mark in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    }
    return marks | {"assistant": bpe.encode("<|im_start|>assistant\n").ids[1]}


def batch(bpe: Tokenizer, recipe: Recipe, number: int) -> Batch:
    """Return batch `number`, which is the same in every run: text of the demo model's recipe, then conversations about
    pictures."""
    marks = marks_of(bpe)

    def samples() -> Iterator[tuple[Rendered, np.ndarray]]:
        index = 0
        while True:
            row = rendered(bpe, training_sample(SEED, number, index))
            yield row, text.targets(row.ids, marks, last_only=False)
            index += 1

    seen = packed(samples(), recipe, marks["<|endoftext|>"])
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
    """Yield all batches in order; other processes make them a little ahead of the training."""
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
