"""Processor of a model's media: turns a request's bytes into media that can be counted, placed in a prompt, and loaded.

Only headers are read until a medium is loaded. The processors are mlx-vlm's and transformers', which are called
directly.
"""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from PIL import Image

from protocol.failures import Code
from protocol.to_worker import Media
from worker.errors import RequestInvalid, foreign_code
from worker.vision.checkpoint import UnsupportedVision
from worker.vision.clips import FrameSampling, open_clip
from worker.vision.images import INVALID, MediaLimits, check_bytes, check_shape, decode, read_header, refused
from worker.vision.layouts import (
    Bounds,
    Expansion,
    Gemma3,
    Gemma3n,
    Gemma4,
    Idefics3,
    Inputs,
    Lfm2Vl,
    Llava,
    MediaLayout,
    Pixtral,
    Qwen,
    QwenByTime,
)
from worker.vision.media import Grid, MediaMarkers, Medium
from worker.vision.sounds import read_audio

log = logging.getLogger("mlxd.worker")

Result = TypeVar("Result")

# Module and class of mlx-vlm's processor, and mlxd's layout, by the model type in config.json.
_FAMILIES: Final[dict[str, tuple[str, str, type[MediaLayout]]]] = {
    "qwen2_vl": ("qwen2_vl.processing_qwen2_vl", "Qwen2VLProcessor", Qwen),
    "qwen2_5_vl": ("qwen2_5_vl.processing_qwen2_5_vl", "Qwen2_5_VLProcessor", Qwen),
    "qwen3_vl": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor", QwenByTime),
    "qwen3_vl_moe": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor", QwenByTime),
    "qwen3_5": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor", QwenByTime),
    "qwen3_5_moe": ("qwen3_vl.processing_qwen3_vl", "Qwen3VLProcessor", QwenByTime),
    "gemma3": ("gemma3.processing_gemma3", "Gemma3Processor", Gemma3),
    "gemma3n": ("gemma3n.processing_gemma3n", "Gemma3nProcessor", Gemma3n),
    "gemma4": ("gemma4.processing_gemma4", "Gemma4Processor", Gemma4),
    "gemma4_unified": ("gemma4_unified.processing_gemma4_unified", "Gemma4UnifiedProcessor", Gemma4),
    "idefics3": ("idefics3.processing_idefics3", "Idefics3Processor", Idefics3),
    "smolvlm": ("smolvlm.processing_smolvlm", "SmolVLMProcessor", Idefics3),
    "llava": ("llava.processing_llava", "LlavaProcessor", Llava),
    "pixtral": ("pixtral.processing_pixtral", "PixtralProcessor", Pixtral),
    "mistral3": ("mistral3.processing_mistral3", "Mistral3Processor", Pixtral),
    "lfm2_vl": ("lfm2_vl.processing_lfm2_vl", "Lfm2VlProcessor", Lfm2Vl),
}
# Files of a checkpoint that determine how pixels become inputs.
_CONFIG_FILES: Final = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Image sizes for which a layout is compared with its processor at load.
_PROBE_SIZES: Final = ((640, 480), (200, 700))
# Sampling of clips that are shown as images; more frames made answers worse.
_IMAGE_FRAMES: Final = FrameSampling(most=16, factor=1)
# The attention of a tower may take the memory divided by this number. It takes heads × patches² × 4 bytes.
_ATTENTION_MEMORY_DIVISOR: Final = 8
_REFERENCE_SIZE: Final = (1024, 1024)


@dataclass(slots=True, frozen=True)
class PreparedMedia:
    """Medium in a prompt: its text with one placeholder per run, and the media whose features fill the runs."""

    kind: str
    text: str
    runs: tuple[int, ...]
    media: tuple[Medium, ...]
    grids: tuple[Grid, ...]
    # Number of tokens after each run that also have feature rows of the run's medium.
    closing: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.runs) + self.closing * len(self.runs)


class Processor:
    """Processor of one model's media, safe for use from any thread."""

    def __init__(self, layout: MediaLayout, kinds: frozenset[str], limits: MediaLimits, digest: bytes) -> None:
        self._layout = layout
        self._limits = limits
        self._digest = digest
        markers = layout.markers
        self.markers = MediaMarkers(
            {kind: marker for kind, marker in markers.by_kind.items() if kind in kinds},
            (*markers.others, *(marker for kind, marker in markers.by_kind.items() if kind not in kinds)),
        )

    @property
    def max_pixels(self) -> int:
        """Return the number of pixels to which larger images are reduced; 0 if another limit applies to the size."""
        own, most = self._layout.max_pixels, self._layout.most_pixels
        return min(own, most or own)

    @property
    def image_tokens(self) -> int:
        """Return the number of placeholders of an image of 1,024 × 1,024 pixels."""
        return sum(self._lay_out(*_REFERENCE_SIZE, self._within(None, None)).runs)

    def read(self, media: Media) -> PreparedMedia:
        """Prepare one medium for a prompt from its header. Raises `RequestInvalid`."""
        check_bytes(media.data, self._limits, media.kind, media.param)
        match media.kind:
            case "image":
                return self._image(media)
            case "video":
                return self._clip(media)
            case _:
                return self._sound(media)

    def read_frames(self, media: Media) -> list[PreparedMedia]:
        """Prepare a video as images, for a model that takes no videos. Raises `RequestInvalid`."""
        check_bytes(media.data, self._limits, media.kind, media.param)
        clip = open_clip(media, self._limits)
        check_shape(clip.width, clip.height, self._layout.patch, media.param)
        bounds = self._bounds(media)
        laid = self._lay_out(clip.width, clip.height, bounds)

        def load(index: int) -> Callable[[], Inputs]:
            return lambda: self._pixels(clip.frames([index])[0], bounds)

        return [
            self._prepared(media, "image", laid, [load(index)], f"frame {index} {bounds}")
            for index in _IMAGE_FRAMES.indices(clip, media.options)
        ]

    def _image(self, media: Media) -> PreparedMedia:
        header = read_header(media.data, self._limits, media.param)
        check_shape(header.width, header.height, self._layout.patch, media.param)
        bounds = self._bounds(media)
        laid = self._lay_out(header.width, header.height, bounds)

        def load() -> Inputs:
            return self._pixels(decode(media.data, header, media.param), bounds)

        return self._prepared(media, "image", laid, [load], f"{bounds}")

    def _clip(self, media: Media) -> PreparedMedia:
        layout, sampling = self._layout, self._layout.sampling
        assert sampling is not None, "clips are read as frames by models that are not shown them"
        clip = open_clip(media, self._limits)
        check_shape(clip.width, clip.height, layout.patch, media.param)
        indices = sampling.indices(clip, media.options)
        seconds = [index / clip.rate for index in indices]
        spacing = (indices[-1] - indices[0]) / (len(indices) - 1) / clip.rate if len(indices) > 1 else 1 / clip.rate
        laid = self._guarded(media, lambda: layout.clip(clip.width, clip.height, seconds, 1 / max(spacing, 1e-3)))

        def load(frames: Sequence[int]) -> Callable[[], Inputs]:
            # The last frame is repeated until the last group of frames is full.
            wanted = [indices[min(frame, len(indices) - 1)] for frame in frames]
            return lambda: layout.clip_inputs(clip.frames(wanted), len(indices))

        # The key includes the grids, because positions depend on the frames' times, and the times also depend on the
        # options.
        how = f"{indices} {laid.grids}"
        return self._prepared(media, "video", laid, [load(piece.frames) for piece in laid.pieces], how)

    def _sound(self, media: Media) -> PreparedMedia:
        layout = self._layout
        samples = read_audio(media, layout.audio_rate, layout.audio_s)
        laid = layout.audio(len(samples))
        if not laid.runs[0]:
            message = f"The audio clip is too short: it lasts {1e3 * len(samples) / layout.audio_rate:.0f} ms."
            raise refused(message, media.param, Code.INVALID_AUDIO)
        return self._prepared(media, "audio", laid, [lambda: layout.audio_inputs(samples)], "")

    def _prepared(
        self, media: Media, kind: str, laid: Expansion, loads: Sequence[Callable[[], Inputs]], how: str
    ) -> PreparedMedia:
        """Build the media of a prompt. `how` lists all options that pixels or positions depend on."""
        parts: list[Medium] = []
        for index, (piece, load) in enumerate(zip(laid.pieces, loads, strict=True)):
            what = f"{media.kind} as {kind} {index} {how}".encode()
            key = blake2b(media.digest + self._digest + what, digest_size=32).digest()
            parts.append(Medium(kind, key, piece.tokens, self._loading(media, load)))
        return PreparedMedia(kind, laid.text, laid.runs, tuple(parts), laid.grids, laid.closing)

    def _loading(self, media: Media, load: Callable[[], Inputs]) -> Callable[[], Inputs]:
        return lambda: self._guarded(media, load)

    def _guarded(self, media: Media, act: Callable[[], Result]) -> Result:
        """Run code of a processor; any error fails only this request."""

        def explain(error: BaseException) -> RequestInvalid:
            reason = str(error).partition("\n")[0]
            message = f"The model's processor refused the {media.kind}: {type(error).__name__}: {reason}"
            return refused(message, media.param, INVALID[media.kind])

        with foreign_code(explain):
            return act()

    def _bounds(self, media: Media) -> Bounds:
        return self._within(self._positive(media, "min_pixels"), self._positive(media, "max_pixels"))

    def _within(self, least: int | None, most: int | None) -> Bounds:
        """Return an image's pixel bounds: those of the request, limited by memory; None means the model's default."""
        layout = self._layout
        if most is None and layout.max_pixels <= (layout.most_pixels or layout.max_pixels):
            return least, None
        highest = min(limit for limit in (most, layout.most_pixels) if limit)
        own_least = int(getattr(layout.images, "min_pixels", 0) or 0)
        return (highest if (least or own_least) > highest else least), highest

    def _positive(self, media: Media, name: str) -> int | None:
        value = media.options.get(name)
        if value is not None and value < 1:
            raise refused(f"{name} is {value:g}; it must be positive.", media.param, Code.INVALID_REQUEST)
        return None if value is None else int(value)

    def _lay_out(self, width: int, height: int, bounds: Bounds) -> Expansion:
        return self._layout.image(*self._scaled(width, height, bounds), bounds)

    def _pixels(self, image: Image.Image, bounds: Bounds) -> Inputs:
        size = self._scaled(image.width, image.height, bounds)
        scaled = image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
        return self._layout.image_inputs(scaled, bounds)

    def _scaled(self, width: int, height: int, bounds: Bounds) -> tuple[int, int]:
        """Return an image's size within bounds, for a family whose processor only preserves the image's shape."""
        least, most = bounds
        pixels = width * height
        if not self._layout.is_scaled or (least or 0) <= pixels <= (most or pixels):
            return width, height
        factor = math.sqrt(((most if most and pixels > most else least) or pixels) / pixels)
        return max(self._layout.patch, int(width * factor)), max(self._layout.patch, int(height * factor))


def open_processor(
    path: Path,
    config: Mapping[str, Any],
    encode: Callable[[str], list[int]],
    placeholders: Mapping[str, int],
    limits: MediaLimits,
    memory_bytes: int = 0,
) -> Processor:
    """Open the processor of a checkpoint. `encode` is the model's tokenizer, including its special tokens.

    `placeholders` are ids by kind of medium that the towers take. Raises `UnsupportedVision` with the reason why the
    model takes no media; one reason is a processor that lays out an image differently from mlxd.
    """
    kind = str(config.get("model_type", ""))
    if kind == "llava" and (config.get("vision_config") or {}).get("model_type") == "pixtral":
        kind = "pixtral"
    if kind not in _FAMILIES:
        raise UnsupportedVision(f"mlxd does not know how '{kind}' shows images in a prompt")
    module, name, layout = _FAMILIES[kind]

    def unusable(error: BaseException) -> UnsupportedVision:
        log.warning("the image processor of %s cannot be used", path, exc_info=True)
        reason = str(error).partition("\n")[0]
        return UnsupportedVision(f"its image processor cannot be used: {type(error).__name__}: {reason}")

    with foreign_code(unusable, UnsupportedVision):
        processor = getattr(import_module(f"mlx_vlm.models.{module}"), name).from_pretrained(
            str(path), trust_remote_code=False
        )
        laid = layout(processor, config)
        _check(laid, processor, encode, placeholders)
    if laid.max_pixels:
        laid.most_pixels = most_pixels(config, laid.patch, memory_bytes)
        if laid.max_pixels > laid.most_pixels > 0:
            log.info("memory limits images to %d of %d pixels", laid.most_pixels, laid.max_pixels)
    return Processor(laid, frozenset(placeholders), limits, _digest(path, laid.most_pixels))


def most_pixels(config: Mapping[str, Any], patch: int, memory_bytes: int) -> int:
    """Return the number of pixels whose attention takes an eighth of memory: heads × patches² × 4 bytes. 0 means no
    limit.

    Memory is rounded down to a power of two, so that a worker with slightly less memory after a restart keeps the image
    sizes.
    """
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    heads = int(vision.get("num_heads") or vision.get("num_attention_heads") or 0)
    if not heads or not memory_bytes:
        return 0
    memory = 1 << (memory_bytes.bit_length() - 1)
    return int(math.sqrt(memory / _ATTENTION_MEMORY_DIVISOR / (heads * 4))) * patch**2


def _check(
    layout: MediaLayout, processor: Any, encode: Callable[[str], list[int]], placeholders: Mapping[str, int]
) -> None:
    """Compare a layout with its processor on sample images. Raises `UnsupportedVision` if they differ."""
    marker = layout.markers.by_kind["image"]
    for width, height in _PROBE_SIZES:
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        theirs = processor(images=[Image.fromarray(noise)], text=f"a{marker}b")["input_ids"]
        laid = layout.image(width, height, (None, None))
        token = placeholders["image"]
        _, ours = expanded(encode(f"a{laid.text}b"), [token], [token] * len(laid.runs), laid.runs)
        if ours != np.asarray(theirs).reshape(-1).tolist():
            raise UnsupportedVision(
                f"its processor lays out an image of {width} × {height} pixels in another way than mlxd"
            )


def expanded(
    ids: Sequence[int], placeholders: Iterable[int], marks: Sequence[int], runs: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Expand placeholders to runs; return where the runs begin, and the expanded ids.

    The k-th placeholder, `marks[k]`, is repeated `runs[k]` times. Raises ValueError if the placeholders are not
    `marks`.
    """
    array = np.array(ids, dtype=np.int64)
    found = np.flatnonzero(np.isin(array, list(placeholders)))
    if array[found].tolist() != list(marks):
        raise ValueError(f"{len(found)} placeholders instead of {len(marks)}")
    counts = np.ones(len(array), dtype=np.int64)
    counts[found] = runs
    begins = np.cumsum(counts) - counts
    return begins[found].tolist(), np.repeat(array, counts).tolist()


def _digest(path: Path, most: int) -> bytes:
    """Return the digest of everything that affects a processor's output except the medium: files, memory, libraries."""
    state = blake2b(f"{most}".encode(), digest_size=32)
    for name in _CONFIG_FILES:
        file = path / name
        state.update(name.encode() + (file.read_bytes() if file.exists() else b""))
    state.update(json.dumps([version(library) for library in ("mlx-vlm", "transformers", "pillow")]).encode())
    return state.digest()
