"""Checkpoints with towers: their names and configurations, and the models that are served as text."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import quantize_model, save_model
from mlx_vlm.utils import load_model as load_whole

from protocol.failures import Code
from tests.support.engine import spec
from tests.support.small_towers import small_towers
from tests.support.vision_models import FAMILIES, build, image, sound
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel, load
from worker.prefix_cache.fingerprint import model_form
from worker.vision import tower
from worker.vision.checkpoint import Needs, UnsupportedVision, fold

Names = Callable[[str], str]


@pytest.fixture
def small_vision() -> Iterator[None]:
    with small_towers():
        yield


def opened(folder: Path) -> LoadedModel:
    return load(spec(folder), lambda *_: None)


def features(loaded: LoadedModel, family: str) -> np.ndarray:
    assert loaded.vision is not None, loaded.no_vision
    draw = np.random.default_rng(5)
    medium = sound(family, draw, 5) if family == "gemma3n" else image(family, draw, 4, 4)
    return np.array(loaded.vision.tower.encode(medium.kind, medium.tokens, medium.load()).embeds)


def logits(loaded: LoadedModel) -> np.ndarray:
    return np.array(loaded.model(mx.array([[9, 10, 11, 12]])))


def rename(folder: Path, names: Names) -> None:
    weights: Any = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), {names(name): array for name, array in weights.items()})


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def hub(name: str) -> str:
    """A name as transformers 5 writes it."""
    name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
    return name.replace("vision_tower.", "model.visual.")


def newer_gemma(name: str) -> str:
    if name.startswith("language_model."):
        return name.replace("language_model.model.", "model.language_model.")
    return "model." + name.replace("vision_tower.vision_model.", "vision_tower.")


def newer_idefics(name: str) -> str:
    name = name.replace("language_model.lm_head", "lm_head")
    return name if name.startswith("lm_head") else "model." + name.replace("language_model.", "text_model.")


@pytest.mark.usefixtures("small_vision")
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3_vl", hub), ("qwen3_vl_moe", hub), ("qwen3_5", hub), ("gemma3", newer_gemma), ("gemma3n", newer_gemma),
        ("gemma4", newer_gemma), ("gemma4_unified", newer_gemma), ("smolvlm", newer_idefics),
    ],
)  # fmt: skip
def test_weights_are_found_under_the_names_of_the_hub(family: str, names: Names, tmp_path: Path) -> None:
    folder = build(family, tmp_path)
    if family == "qwen3_5":  # whose norms are told by the names of its weights
        rename(folder, lambda name: hub(name) if "vision" in name else name)
    before = opened(folder)
    expected = features(before, family), logits(before)
    if family != "qwen3_5":
        rename(folder, names)
    after = opened(folder)
    np.testing.assert_array_equal(features(after, family), expected[0])
    np.testing.assert_array_equal(logits(after), expected[1])


def test_weights_of_nothing_that_is_known_are_left_out(tmp_path: Path) -> None:
    folder = build("pixtral", tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights["talker.model.weight"] = weights["language_model.model.layers.9.mlp.up_proj.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert opened(folder).vision is not None


def test_a_missing_weight_of_the_text_is_an_error_and_of_the_tower_leaves_the_text(tmp_path: Path) -> None:
    folder = build("gemma3", tmp_path)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    projector = weights.pop("multi_modal_projector.mm_input_projection_weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    loaded = opened(folder)
    assert loaded.vision is None
    assert "tower could not be loaded" in loaded.no_vision
    assert logits(loaded).shape[-1] == FAMILIES["gemma3"]["vocab_size"]
    weights["multi_modal_projector.mm_input_projection_weight"] = projector
    weights.pop("language_model.model.layers.0.mlp.up_proj.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(LoadFailed):
        opened(folder)


def test_rope_parameters_of_newer_configurations_mean_what_older_ones_say(tmp_path: Path) -> None:
    folder = build("pixtral", tmp_path)
    expected = features(opened(folder), "pixtral"), logits(opened(folder))

    def newer(config: dict[str, Any]) -> None:
        for section in (config["text_config"], config["vision_config"]):
            section["rope_parameters"] = {"rope_type": "default", "rope_theta": section.pop("rope_theta")}

    edit(folder, newer)
    np.testing.assert_array_equal(features(opened(folder), "pixtral"), expected[0])
    np.testing.assert_array_equal(logits(opened(folder)), expected[1])


def test_two_values_of_one_setting_are_refused(tmp_path: Path) -> None:
    folder = build("pixtral", tmp_path)
    edit(folder, lambda config: config["text_config"].update(rope_parameters={"rope_theta": 5.0}))
    with pytest.raises(LoadFailed, match=r"rope_theta as 10000\.0, and as 5\.0 in rope_parameters") as raised:
        opened(folder)
    assert raised.value.failure.code is Code.MODEL_CORRUPT


def test_folding_leaves_what_both_libraries_know() -> None:
    for config in FAMILIES.values():
        folded = fold(config)
        assert {key: folded[key] for key in config if key not in ("text_config", "vision_config")} == {
            key: config[key] for key in config if key not in ("text_config", "vision_config")
        }


def test_layers_may_be_quantized_each_in_its_own_way(tmp_path: Path) -> None:
    folder = build("pixtral", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    whole: Any = load_whole(folder)

    def bits(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or "vision" in path or module.weight.shape[-1] % 32:
            return False
        return {"group_size": 32, "bits": 8 if "mlp" in path else 4}

    whole, config = quantize_model(whole, config, 32, 4, quant_predicate=bits)
    save_model(folder, whole)
    (folder / "config.json").write_text(json.dumps(config))
    loaded = opened(folder)
    assert features(loaded, "pixtral").shape == (16, 64)
    layer = loaded.model.layers[0]
    assert (layer.mlp.up_proj.bits, layer.self_attn.q_proj.bits) == (8, 4)
    ids = mx.array([[9, 10, 11, 12]])
    np.testing.assert_allclose(logits(loaded), np.array(whole.language_model(ids).logits), atol=1e-4)


def test_without_mlx_vlm_a_vision_model_is_served_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("qwen2_vl", tmp_path)
    whole = opened(folder)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlx_vlm" else find(name))
    loaded = opened(folder)
    assert loaded.vision is None
    assert loaded.no_vision == tower.MISSING
    assert "mlxctl setup vision" in loaded.no_vision
    np.testing.assert_array_equal(logits(loaded), logits(whole))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "paligemma"}, "attention of its own over the prompt"),
        ({"model_type": "mllama"}, "cross-attention to the image"),
        ({"model_type": "glm4v", "text_config": FAMILIES["qwen3_vl"]["text_config"]}, "positions in space of 'glm4v'"),
        ({"image_token_index": None}, "no placeholder token"),
        ({"model_type": "minicpmo", "image_token_index": None, "audio_config": {"d_model": 8}}, "no placeholder token"),
        ({"model_type": "phi4mm", "vision_config": None, "audio_processor": {"name": "cascades"}}, "no tower"),
        (
            {"model_type": "gemma3n", "audio_token_id": 9, "audio_config": {"d": 8}},
            "lacks eoi_token_id and eoa_token_id",
        ),
        ({"vision_config": None}, "no tower"),
    ],
)
def test_a_model_that_no_graft_makes_right_takes_text_alone(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedVision, match=reason):
        Needs.of({"model_type": "pixtral", **FAMILIES["pixtral"], **change})


def test_memory_of_the_tower_counts_as_weights(tmp_path: Path) -> None:
    loaded = opened(build("llava", tmp_path))
    assert loaded.vision is not None
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < loaded.vision.tower.nbytes < loaded.weights_bytes <= size


def test_another_processor_is_another_cache_on_disk(tmp_path: Path) -> None:
    loaded = opened(build("pixtral", tmp_path))
    before = model_form(loaded, ["KVCache"])
    (tmp_path / "preprocessor_config.json").write_text('{"size": 3}')
    assert model_form(loaded, ["KVCache"]).configuration != before.configuration
