"""Random-weight models of Qwen3-VL's geometry, built once into `.cache/bench-models`, without a download."""

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import models

SPECIALS: Final = (*models.SPECIALS, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE: Final = r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content %}
{%- if part.type == 'text' %}{{- part.text }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
_MEAN: Final = [0.5, 0.5, 0.5]


class Tower(msgspec.Struct, frozen=True):
    depth: int
    hidden: int
    ffn: int
    heads: int
    patch: int
    deepstack: tuple[int, ...]


class Geometry(msgspec.Struct, frozen=True):
    """The shape of a Qwen3-VL model. Change `recipe` when the builder changes what it writes."""

    text: models.Geometry
    tower: Tower
    sections: tuple[int, int, int]
    recipe: int = 2


GEOMETRIES: Final[dict[str, Geometry]] = {
    "tiny": Geometry(
        models.Geometry(layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=4096),
        Tower(depth=2, hidden=32, ffn=64, heads=2, patch=16, deepstack=(0,)),
        sections=(4, 2, 2),
    ),
    "qwen3-vl-8b": Geometry(
        models.GEOMETRIES["qwen3-8b"],
        Tower(depth=27, hidden=1152, ffn=4304, heads=16, patch=16, deepstack=(8, 16, 24)),
        sections=(24, 20, 20),
    ),
}


def build(name: str, dtype: str) -> Path:
    """Return the folder of a model, and build it if there is none. Raises KeyError for an unknown name."""
    geometry = GEOMETRIES[name]
    recipe = [msgspec.to_builtins(geometry), dtype, TEMPLATE]
    return models.once(f"{name}-{dtype}", recipe, lambda folder: _write(folder, geometry, dtype))


def _write(folder: Path, geometry: Geometry, dtype: str) -> None:
    import mlx.core as mx
    from mlx_lm.utils import save_model
    from mlx_vlm.models import qwen3_vl
    from mlx_vlm.utils import update_module_configs

    tokenizer = models.new_tokenizer(geometry.text.tokenizer_vocab, SPECIALS, TEMPLATE)
    tokenizer.save_pretrained(folder)
    ids: dict[str, int] = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    config = _config(geometry, dtype, ids)
    classes: Any = qwen3_vl
    arguments = update_module_configs(classes.ModelConfig.from_dict(config), classes, config, ["text", "vision"])
    mx.random.seed(0)
    model: Any = classes.Model(arguments)
    model.set_dtype(getattr(mx, dtype))
    text = model.language_model
    models.speak(text.model.embed_tokens if geometry.text.tied else text.lm_head, tokenizer)
    mx.eval(model.parameters())
    save_model(folder, model)
    # mlx-lm's own writer omits the tower.
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_processor(folder, geometry.tower.patch)


def _write_processor(folder: Path, patch: int) -> None:
    pixels = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, "image_mean": _MEAN, "image_std": _MEAN}
    files = {
        "preprocessor_config": {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, **pixels},
        "video_preprocessor_config": {"size": {"shortest_edge": 4096, "longest_edge": 25_165_824}, "fps": 2, **pixels},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content | {"processor_class": "Qwen3VLProcessor"}))


def _config(geometry: Geometry, dtype: str, ids: dict[str, int]) -> dict[str, Any]:
    text, tower = geometry.text, geometry.tower
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": text.tied,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "eos_token_id": ids["<|im_end|>"],
        "torch_dtype": dtype,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": text.hidden,
            "num_hidden_layers": text.layers,
            "intermediate_size": text.ffn,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "rms_norm_eps": 1e-6,
            "vocab_size": text.vocab,
            "max_position_embeddings": 32768,
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": geometry.sections},
            "tie_word_embeddings": text.tied,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": tower.depth,
            "hidden_size": tower.hidden,
            "intermediate_size": tower.ffn,
            "num_heads": tower.heads,
            "in_channels": 3,
            "patch_size": tower.patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": text.hidden,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": tower.deepstack,
        },
    }
