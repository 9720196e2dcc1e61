"""Folders of tiny vision models without weights: a tokenizer, the files of a processor, a configuration."""

import json
from pathlib import Path
from typing import Any, Final

DEMO: Final = Path(__file__).parents[2] / "worker" / "demo_model"
_HALVES: Final = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN: Final = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 1024, "max_pixels": 16384}
_QWEN_TOKENS: Final = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_TILES: Final = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_IDEFICS_TOKENS: Final = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILES)
_LFM_TILES: Final = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5))
_GEMMA4: Final = {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2}
_GEMMA4_TOKENS: Final = (
    ("<|image|>", "<|video|>", "<|audio|>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
    {"processor_config": {"image_processor": _GEMMA4, "video_processor": _GEMMA4}},
    {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
     "boa_token": "<|audio>", "eoa_token": "<audio|>"},
)  # fmt: skip

# Special tokens, the first that of images; files of the processor; attributes of the tokenizer; configuration.
FAMILIES: Final[dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, str], dict[str, Any]]]] = {
    "qwen2_vl": (_QWEN_TOKENS, {"preprocessor_config": _QWEN}, {}, {"vision_config": {"num_heads": 4}}),
    "qwen2_5_vl": (
        _QWEN_TOKENS, {"preprocessor_config": _QWEN}, {}, {"vision_config": {"tokens_per_second": 2, "num_heads": 4}},
    ),
    "qwen3_vl": (
        _QWEN_TOKENS,
        {"preprocessor_config": _QWEN, "video_preprocessor_config": {**_QWEN, "min_frames": 2, "max_frames": 8}},
        {}, {"vision_config": {"num_heads": 4}},
    ),
    "qwen3_5": (_QWEN_TOKENS, {"preprocessor_config": _QWEN}, {}, {"vision_config": {"num_heads": 4}}),
    "gemma3": (
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        {"preprocessor_config": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32},
                                 **_HALVES},
         "processor_config": {"image_seq_length": 4}},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"vision_config": {"patch_size": 8}},
    ),
    "gemma4": (*_GEMMA4_TOKENS, {"vision_config": {"patch_size": 8}, "audio_config": {"hidden_size": 8}}),
    "gemma3n": (
        # As in its vocabulary: images and what ends them, audio and what ends it.
        ("<image_soft_token>", "<end_of_image>", "<audio_soft_token>", "<end_of_audio>", "<start_of_image>",
         "<start_of_audio>"),
        {"preprocessor_config": {"image_processor_type": "SiglipImageProcessor", "size": {"height": 32, "width": 32},
                                 "feature_extractor_type": "Gemma3nAudioFeatureExtractor", **_HALVES},
         "processor_config": {"image_seq_length": 4, "audio_seq_length": 6}},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
         "audio_token": "<audio_soft_token>", "boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>"},
        {"vision_config": {}, "audio_config": {"hidden_size": 8}},
    ),
    "gemma4_unified": (*_GEMMA4_TOKENS, {"vision_config": {"patch_size": 8}, "audio_config": {"hidden_size": 8}}),
    "idefics3": (
        _IDEFICS_TOKENS,
        {"preprocessor_config": {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 128},
                                 "max_image_size": {"longest_edge": 32}, "do_image_splitting": True, **_HALVES},
         "processor_config": {"image_seq_len": 4}},
        {"image_token": "<image>"}, {"vision_config": {"patch_size": 8}},
    ),
    "smolvlm": (
        _IDEFICS_TOKENS,
        {"preprocessor_config": {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 100},
                                 "max_image_size": {"longest_edge": 32}, "do_image_splitting": True, **_HALVES},
         "processor_config": {"image_seq_len": 4}},
        {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
         "global_image_token": "<global-img>"},
        {"vision_config": {"patch_size": 8}},
    ),
    "llava": (
        ("<image>",),
        {"preprocessor_config": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32},
                                 "crop_size": {"height": 32, "width": 32}},
         "processor_config": {"patch_size": 8, "vision_feature_select_strategy": "default",
                              "num_additional_image_tokens": 1}},
        {}, {"vision_config": {"patch_size": 8}},
    ),
    "pixtral": (
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"preprocessor_config": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64},
                                 "patch_size": {"height": 8, "width": 8}},
         "processor_config": {"patch_size": 8}},
        {}, {"model_type": "llava", "vision_config": {"model_type": "pixtral", "patch_size": 8}},
    ),
    "mistral3": (
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        {"preprocessor_config": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64},
                                 "patch_size": 8}},
        {}, {"spatial_merge_size": 2, "vision_config": {"model_type": "pixtral", "patch_size": 8}},
    ),
    "lfm2_vl": (
        ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_LFM_TILES),
        {"preprocessor_config": {"downsample_factor": 2, "encoder_patch_size": 8, "tile_size": 64,
                                 "min_image_tokens": 4, "max_image_tokens": 16}},
        {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
         "image_thumbnail": "<|img_thumbnail|>"},
        {"vision_config": {"patch_size": 8}},
    ),
}  # fmt: skip
_KINDS: Final = (("image", ("<|image_pad|>", "<image>", "[IMG]", "<|image|>", "<image_soft_token>")),
                 ("video", ("<|video_pad|>", "<|video|>")), ("audio", ("<|audio|>", "<audio_soft_token>")))  # fmt: skip


def build(family: str, folder: Path) -> dict[str, int]:
    """Write the folder of a family; returns the ids of its placeholders by kind."""
    tokens, files, attributes, config = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    ids = {token: 2560 + index for index, token in enumerate(tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": number, "content": token, **flags} for token, number in ids.items()]
    named = json.loads((DEMO / "tokenizer_config.json").read_text()) | attributes
    written = {"tokenizer": tokenizer, "tokenizer_config": named, "config": {"model_type": family, **config}, **files}
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {
        kind: next(ids[token] for token in known if token in ids) for kind, known in _KINDS if ids.keys() & set(known)
    }
