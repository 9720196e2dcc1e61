"""Conversations with media as token ids, positions and patches: Qwen3-VL's prompt format and image layout.

A picture of h × w patches becomes h·w/4 placeholder tokens; a clip becomes one group of placeholders per two frames,
each after the group's time. Positions have three axes (time, row, column), as in `get_rope_index` of transformers'
Qwen3-VL. Sources: transformers' `modeling_qwen3_vl.py` and `processing_qwen3_vl.py`.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import jinja2
import numpy as np
from deploy.demo_model import tokenizer as text
from PIL import Image
from tokenizers import Tokenizer

from .questions import Clip, Medium
from .samples import VisionSample

PATCH: Final = 8
MERGE: Final = 2
GROUP: Final = 2
SIDE: Final = 16  # side of the square table of learned positions
MARKS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCABULARY: Final = 2568  # a multiple of 8, with room for the text model's 2560 entries and the marks

_OLD: Final = "{{- part if part is string else (part.text or '') -}}"
_NEW: Final = (
    "\n            {%- if part is string -%}{{- part -}}"
    "\n            {%- elif part.type in ('image', 'image_url', 'input_image') -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "\n            {%- elif part.type in ('video', 'video_url', 'input_video') -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "\n            {%- else -%}{{- part.text or '' -}}{%- endif -%}\n        "
)


def template() -> str:
    """Return the text model's template, changed to render media in content lists."""
    plain = text.TEMPLATE.read_text()
    assert _OLD in plain
    return plain.replace(_OLD, _NEW).replace(
        "The chat template of the mlxd demo model", "The chat template of mlxd's demo-vision model"
    )


def vocabulary(plain: Tokenizer) -> Tokenizer:
    """Return the text model's tokenizer, with the marks of media after its own entries."""
    shape = json.loads(plain.to_str())
    first = text.VOCABULARY
    for number, mark in enumerate(MARKS):
        shape["added_tokens"].append(
            {
                "id": first + number,
                "content": mark,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    return Tokenizer.from_str(json.dumps(shape))


@cache
def conversations() -> jinja2.Template:
    return text.environment().from_string(template())


def grid(picture: Image.Image) -> tuple[int, int]:
    width, height = picture.size
    return height // PATCH, width // PATCH


def patches(picture: Image.Image) -> np.ndarray:
    """Return bytes (patches, 3 · 8 · 8), where the four patches of each token are adjacent."""
    h, w = grid(picture)
    pixels = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
    cut = pixels.reshape(3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    return cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(h * w, 3 * PATCH * PATCH)


@cache
def places(h: int, w: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row and column of each patch, the four learned positions that are interpolated for it, and their
    weights."""

    def order(values: np.ndarray) -> np.ndarray:
        cut = values.reshape(h // MERGE, MERGE, w // MERGE, MERGE, *values.shape[2:])
        return cut.swapaxes(1, 2).reshape(h * w, *values.shape[2:])

    rows, columns = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    y, x = np.linspace(0, SIDE - 1, h), np.linspace(0, SIDE - 1, w)
    top, left = np.floor(y).astype(int), np.floor(x).astype(int)
    bottom, right = np.minimum(top + 1, SIDE - 1), np.minimum(left + 1, SIDE - 1)
    dy, dx = (y - top)[:, None], (x - left)[None]
    index = np.stack([a[:, None] * SIDE + b[None] for a in (top, bottom) for b in (left, right)], -1)
    weight = np.stack([(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx], -1)
    return order(np.stack([rows, columns], -1)), order(index), order(weight).astype(np.float32)


@dataclass(slots=True)
class Rendered:
    """Conversation as arrays.

    `positions` is (3, tokens); `slots` are the positions of placeholders among the tokens; `first` and `second` are the
    two frames of each patch, (patches, 192) bytes, which are the same for a picture; `grids` is one (h, w) per tower
    call.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    first: np.ndarray
    second: np.ndarray
    grids: list[tuple[int, int]]


def expanded(rendered: str, media: list[Medium]) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered text with each mark replaced by its placeholders, and the grid of each tower call."""
    grids: list[tuple[int, int]] = []
    out: list[str] = []
    rest = rendered
    for medium in media:
        if isinstance(medium, Clip):
            before, _, rest = rest.partition("<|vision_start|><|video_pad|><|vision_end|>")
            out.append(before)
            for group in range(len(medium.frames) // GROUP):
                h, w = grid(medium.frames[0])
                time = (2 * group * GROUP + GROUP - 1) / 2 / medium.fps
                out.append(f"<{time:.1f} seconds><|vision_start|>{'<|video_pad|>' * (h * w // MERGE**2)}<|vision_end|>")
                grids.append((h, w))
        else:
            before, _, rest = rest.partition("<|vision_start|><|image_pad|><|vision_end|>")
            h, w = grid(medium)
            out += [before, f"<|vision_start|>{'<|image_pad|>' * (h * w // MERGE**2)}<|vision_end|>"]
            grids.append((h, w))
    return "".join((*out, rest)), grids


def rendered(bpe: Tokenizer, sample: VisionSample) -> Rendered:
    text_, grids = expanded(conversations().render(messages=sample.messages, tools=sample.tools), sample.media)
    ids = np.array(bpe.encode(text_).ids, np.int64)
    frames = [frame for medium in sample.media for frame in _frames(medium)]
    first = np.concatenate([patches(a) for a, _ in frames])
    moves = any(a is not b for a, b in frames)
    pads = (bpe.token_to_id("<|image_pad|>"), bpe.token_to_id("<|video_pad|>"))
    slots = np.flatnonzero(np.isin(ids, pads))
    return Rendered(
        ids,
        positions(ids, slots, grids),
        slots,
        first,
        np.concatenate([patches(b) for _, b in frames]) if moves else first,
        grids,
    )


def _frames(medium: Medium) -> list[tuple[Image.Image, Image.Image]]:
    if isinstance(medium, Clip):
        return [(medium.frames[at], medium.frames[at + 1]) for at in range(0, len(medium.frames), GROUP)]
    return [(medium, medium)]


def positions(ids: np.ndarray, slots: np.ndarray, grids: list[tuple[int, int]]) -> np.ndarray:
    """Return positions (3, tokens): text counts up on all axes; a medium has one time, and its own rows and columns."""
    out = np.empty((3, len(ids)), np.int64)
    at = position = taken = 0
    for h, w in grids:
        rows, columns = h // MERGE, w // MERGE
        begin = int(slots[taken])
        out[:, at:begin] = np.arange(begin - at) + position
        position += begin - at
        block = np.stack(np.meshgrid([0], np.arange(rows), np.arange(columns), indexing="ij")).reshape(3, -1)
        at = begin + rows * columns
        out[:, begin:at] = block + position
        position += max(rows, columns)
        taken += rows * columns
    out[:, at:] = np.arange(len(ids) - at) + position
    return out


def tokenizer_files(bpe: Tokenizer, folder: Any) -> None:
    """Write the tokenizer's files, in the format that transformers, mlx-lm and mlx-vlm load."""
    bpe.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>", *MARKS], "clean_up_tokenization_spaces": False, "model_max_length": 32768,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(template())
