"""Rotary embeddings: `rope_parameters` of transformers 5 and older keys give one model, or a refusal that says why."""

import importlib
import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma2, gemma3_text, gpt_oss, llama, olmo3, recurrent_gemma
from mlx_lm.models.rope_utils import SuScaledRoPE, YarnRoPE
from mlx_lm.utils import MODEL_REMAPPING

from gateway.model_files.metadata import inspect
from protocol.checkpoint import UnusableRope, context_of, fold_rope
from protocol.failures import Code
from tests.support.engine import spec
from tests.support.models import build, write
from tests.support.scale import scaled
from worker.embedding.backbones import shape_of
from worker.errors import LoadFailed
from worker.model.class_checks import check_rope
from worker.model.loader import load
from worker.vision.checkpoint import fold, text_config

CONFIGURATIONS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "support" / "architectures.json").read_text()
)
# bitnet runs on Metal only. This class computes with 10,000 whatever its file says, which a test below refuses.
LEFT_OUT = ("bitnet", "recurrent_gemma")
SAMPLE = (
    "llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "phi3", "gemma2", "gemma3_text",
    "gemma3n", "glm4_moe", "gpt_neox", "gpt_oss", "deepseek_v3", "exaone4", "internlm3, dynamic rope", "hunyuan",
    "llama4", "mimo_v2_flash", "minicpm3", "step3p5", "stablelm, 2", "cohere2", "olmo3",
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3 = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "sliding_window": 32,
          "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}  # fmt: skip


def as_transformers_5(section: dict[str, Any]) -> dict[str, Any]:
    """The section as transformers 5 writes it: the numbers of the older keys under `rope_parameters` alone."""
    new = deepcopy(section)
    scaling = new.pop("rope_scaling", None) or {}
    table = {key: value for key, value in scaling.items() if key != "type"}
    table["rope_type"] = scaling.get("type", scaling.get("rope_type", "default"))
    renamed = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    for key in ("rope_theta", "partial_rotary_factor", *renamed):
        if key in new:
            table[renamed.get(key, key)] = new.pop(key)
    local = next((new.pop(key) for key in ("rope_local_base_freq", "swa_rope_theta") if key in new), None)
    if local is None:
        new["rope_parameters"] = table
    else:
        shared = {key: table[key] for key in ("partial_rotary_factor",) if key in table}
        sliding = {"rope_type": "default", "rope_theta": local, **shared}
        new["rope_parameters"] = {"full_attention": table, "sliding_attention": sliding}
    return new


def is_old(section: dict[str, Any]) -> bool:
    return "rope_parameters" not in section and any(
        section.get(key) is not None for key in ("rope_theta", "rotary_emb_base", "rope_scaling")
    )


def both_forms(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    new = as_transformers_5(config) if is_old(config) else deepcopy(config)
    if isinstance(text := new.get("text_config"), dict) and is_old(text):
        new["text_config"] = as_transformers_5(text)
    return config, new


def _larger(array: mx.array) -> mx.array:
    return array * 1.5 if array.ndim > 1 else array


def loaded(folder: Path) -> Any:
    return load(spec(folder), lambda _stage, _done, _total: None).model


def logits(module: Any, config: dict[str, Any]) -> mx.array:
    """The logits of a random model of this configuration, whose class has been checked."""
    folded = fold(config)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(folded))
    model.apply(_larger)
    check_rope(model, text_config(folded))
    return model(mx.array([[(20 + 7 * at) % 200 for at in range(24)]]))


@pytest.mark.parametrize("name", scaled([name for name in CONFIGURATIONS if name not in LEFT_OUT], SAMPLE))
def test_both_forms_of_a_configuration_give_equal_logits(name: str) -> None:
    kind = str(CONFIGURATIONS[name]["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    old, new = both_forms(CONFIGURATIONS[name])
    assert mx.array_equal(logits(module, old), logits(module, new)).item()


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_file_of_transformers_5_is_loaded_with_its_own_numbers(tmp_path: Path, kind: str) -> None:
    theta, scaling = 500_000.0, LLAMA3 if kind == "llama" else {}
    old = build(kind, tmp_path / "old", rope_theta=theta, rope_scaling=scaling or None)
    new = build(kind, tmp_path / "new", rope_theta=theta, rope_scaling=scaling or None)
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(as_transformers_5(config)))
    plain = build(kind, tmp_path / "plain", rope_theta=10_000.0)
    ids = mx.array([[(20 + 7 * at) % 200 for at in range(80)]])
    of_old, of_new, of_plain = (loaded(folder)(ids) for folder in (old, new, plain))
    assert mx.array_equal(of_old, of_new).item()
    assert not mx.array_equal(of_plain, of_new).item()


def test_scaling_of_one_type_of_layer_is_applied_to_that_type() -> None:
    old = {**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 2e4,
           "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    new = {**GEMMA3, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }}  # fmt: skip
    assert mx.array_equal(logits(gemma3_text, old), logits(gemma3_text, new)).item()
    unscaled = {**old, "rope_scaling": None}
    assert not mx.array_equal(logits(gemma3_text, old), logits(gemma3_text, unscaled)).item()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta as 10000.0, and as 500000.0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "factor",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {**YARN}}, "linear"),
        ({"rope_scaling": {**YARN}, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "yarn"),
        ({"rope_local_base_freq": 1e4, "rope_parameters": {
            "full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 2e4}}}, "rope_local_base_freq"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, 'type and rope_type as "linear" and "yarn"'),
        ({"rope_parameters": {"full_attention": {**YARN, "type": "default"}}}, '"default" and "yarn"'),
        ({"rope_scaling": {"full_attention": {**YARN}}, "rope_parameters": {"rope_theta": 1e4}}, "both have tables"),
    ],
)  # fmt: skip
def test_forms_that_contradict_each_other_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRope, match=reason):
        fold_rope(config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"rope_theta": "500000"}, 'config.json gives rope_theta as "500000"'),
        ({"rope_theta": True}, "rope_theta as true"),
        ({"rope_theta": float("nan")}, "rope_theta as NaN"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters of config.json gives rope_theta as 0"),
        ({"rope_parameters": {**YARN, "factor": "4"}}, 'factor as "4"'),
        ({"rope_scaling": {"type": "linear", "factor": -4.0}}, "factor as -4.0"),
        ({"rope_parameters": {"full_attention": {"partial_rotary_factor": "0.5"}}}, 'partial_rotary_factor as "0.5"'),
        ({"text_config": {"rope_theta": "1e6"}}, 'rope_theta as "1e6"'),
    ],
)  # fmt: skip
def test_values_that_are_no_numbers_of_an_embedding_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRope, match=reason):
        fold_rope(config)


def test_numbers_of_each_layer_and_keys_without_a_value_are_left_to_the_class() -> None:
    folded = fold_rope({"rope_theta": [1e4, 1e6], "rope_scaling": {**YARN, "beta_fast": None, "type": None}})
    assert folded["rope_theta"] == [1e4, 1e6]
    assert folded["rope_scaling"] == {**YARN, "type": "yarn"}


def test_forms_that_agree_may_stand_beside_each_other() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": LLAMA3}
    folded = fold_rope({**old, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}})
    assert folded["rope_theta"] == 5e5
    assert folded["rope_scaling"] == {**LLAMA3, "type": "llama3"}


@pytest.mark.parametrize(("kind", "name"), [("su", "longrope"), ("longrope", "longrope"), ("mrope", "mrope")])
def test_older_names_of_a_type_are_read(kind: str, name: str) -> None:
    assert fold_rope({"rope_scaling": {"type": kind, "factor": 2.0}})["rope_scaling"]["type"] == name


@pytest.mark.parametrize("kind", ["yarn", "llama3", "longrope"])
@pytest.mark.parametrize(("stated", "original"), [({}, 256), ({"original_max_position_embeddings": 64}, 64)])
def test_a_scaling_without_its_original_context_has_the_one_that_transformers_takes(
    kind: str, stated: dict[str, Any], original: int
) -> None:
    for form in ("rope_scaling", "rope_parameters"):
        table = {"rope_type": kind, "factor": 4.0}
        folded = fold_rope({"max_position_embeddings": 256, **stated, form: table})
        assert folded[form]["original_max_position_embeddings"] == original


def test_tables_by_type_of_layer_are_read_under_the_older_key() -> None:
    tables = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
              "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}  # fmt: skip
    old, new = ({**GEMMA3, form: tables} for form in ("rope_scaling", "rope_parameters"))
    assert mx.array_equal(logits(gemma3_text, old), logits(gemma3_text, new)).item()
    assert context_of({"max_position_embeddings": 64, "rope_scaling": {"full_attention": {**YARN}}}) == (
        "max_position_embeddings", 256,
    )  # fmt: skip


def test_a_contradiction_in_a_file_is_a_refusal_of_the_load(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder("qwen3").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_theta": 7.0}}))
    with pytest.raises(LoadFailed, match="rope_theta as 10000") as caught:
        loaded(folder)
    assert caught.value.failure.code is Code.MODEL_CORRUPT


@pytest.mark.parametrize(
    ("module", "changes", "reason"),
    [
        (gemma2, {"rope_parameters": {"rope_theta": 1e4, **YARN}}, "the scaling 'yarn'"),
        (gemma2, {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, "the scaling 'linear'"),
        (gemma2, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (gemma2, {"rope_parameters": {
            "full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4},
        }}, "sliding_attention"),
        (olmo3, {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, **YARN}, "sliding_attention": {"rope_theta": 1e4},
        }}, "rope_theta = 10000; it has 500000"),
        (olmo3, {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": {
            "full_attention": {"rope_theta": 5e5, **YARN}, "sliding_attention": {"rope_theta": 5e5, **YARN},
        }}, "the scaling 'yarn'"),
        (recurrent_gemma, {}, "rope_theta = 1000; it has 10000"),
        (llama, {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8, "rope_parameters": {
            "full_attention": {"rope_theta": 1e6, **YARN}, "sliding_attention": {"rope_theta": 1e6},
        }}, "sliding_attention.*that these are not scaled"),
        (gpt_oss, {"rope_scaling": {**YARN, "truncate": False}}, "truncate, which needs"),
    ],
)  # fmt: skip
def test_numbers_that_the_class_would_ignore_are_a_refusal(module: Any, changes: dict[str, Any], reason: str) -> None:
    name = module.__name__.rpartition(".")[2]
    config = {key: value for key, value in CONFIGURATIONS[name].items() if not changes or "rope_theta" not in key}
    with pytest.raises(LoadFailed, match=reason) as caught:
        logits(module, {**config, **changes})
    assert caught.value.failure.code is Code.MODEL_UNSUPPORTED


def scaled_ropes(folder: Path, table: dict[str, Any]) -> list[Any]:
    build("llama", folder, rope_theta=1e6, max_position_embeddings=512, num_hidden_layers=2, rope_scaling=table)
    return [part for part in loaded(folder).modules() if isinstance(part, YarnRoPE | SuScaledRoPE)]


def published_yarn(dims: int, base: float, table: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Inverse frequencies as transformers computes them (modeling_rope_utils.py, _compute_yarn_parameters)."""
    positions = base ** (np.arange(0, dims, 2) / dims)
    bounds = [dims * np.log(table["original_max_position_embeddings"] / (turns * 2 * np.pi)) / (2 * np.log(base))
              for turns in (32, 1)]  # fmt: skip
    if table.get("truncate", True):
        bounds = [np.floor(bounds[0]), np.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], dims - 1)
    kept = 1 - np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    return 1 / (table["factor"] * positions) * (1 - kept) + 1 / positions * kept


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_has_the_frequencies_that_transformers_computes(tmp_path: Path, truncate: bool) -> None:
    table = {**YARN, "original_max_position_embeddings": 128, "truncate": truncate}
    ropes = scaled_ropes(tmp_path / "model", table)
    assert len(ropes) == 2
    for rope in ropes:
        assert np.allclose(1 / np.array(rope._freqs), published_yarn(16, 1e6, table), rtol=1e-4)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "scale"),
    [
        (YARN, 0.1 * math.log(4) + 1),
        ({**YARN, "attention_factor": 1.25}, 1.25),
        (LONGROPE, math.sqrt(1 + math.log(8) / math.log(64))),
        ({**LONGROPE, "factor": 4.0}, math.sqrt(1 + math.log(4) / math.log(64))),
        ({**LONGROPE, "factor": 1.0}, 1.0),
        ({**LONGROPE, "attention_factor": 1.25}, 1.25),
    ],
)
def test_scaled_embeddings_have_the_attention_factor_of_the_file(
    tmp_path: Path, table: dict[str, Any], scale: float
) -> None:
    ropes = scaled_ropes(tmp_path / "model", table)
    assert len(ropes) == 2
    assert all(math.isclose(getattr(rope, "mscale", None) or rope._scale, scale) for rope in ropes)


def test_qwen3_5_computes_with_the_older_keys_where_its_file_has_only_these(tmp_path: Path) -> None:
    config = CONFIGURATIONS["qwen3_5"]
    (old, new), module = both_forms(config), importlib.import_module("mlx_lm.models.qwen3_5")
    assert mx.array_equal(logits(module, old), logits(module, new)).item()
    folder = write(module, {key: config[key] for key in config if key != "vocab_size"}, tmp_path / "model")
    check_rope(loaded(folder), text_config(fold(config)))


QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 32768, "rope_scaling": QWEN_YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": QWEN_YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": QWEN_YARN}, 131072),
        ({"max_position_embeddings": 262144, "rope_scaling": QWEN_YARN}, 262144),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4}}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {**QWEN_YARN, "rope_theta": 1e6}}, 131072),
        ({"max_position_embeddings": 32768, "rope_parameters": {
            "full_attention": {**QWEN_YARN, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, 131072),
        ({"text_config": {"max_position_embeddings": 32768, "rope_scaling": QWEN_YARN}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {
            "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {
            "type": "longrope", "original_max_position_embeddings": 4096, "factor": 32.0}}, 131072),
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072, "rope_scaling": {
            "rope_type": "linear", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 1e300}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": "4"}}, 4096),
        ({"max_position_embeddings": -5, "rope_scaling": {"type": "linear", "factor": 4.0}}, -5),
        ({"max_position_embeddings": "long", "rope_scaling": QWEN_YARN}, "long"),
    ],
)  # fmt: skip
def test_the_context_is_the_one_to_which_the_rotary_embedding_is_scaled(config: dict[str, Any], context: Any) -> None:
    named = context_of(config)
    assert named is not None
    assert named[1] == context


@pytest.mark.parametrize(("cap", "context"), [(0, 256), (200, 200), (512, 256)])
def test_a_scaled_context_is_served_and_told_by_the_gateway(tmp_path: Path, cap: int, context: int) -> None:
    folder = build("qwen3", tmp_path / "model", max_position_embeddings=64, rope_scaling=YARN)
    assert load(spec(folder, context=cap), lambda _stage, _done, _total: None).max_context == context
    assert inspect(folder, "auto", cap, 1 << 40).context == context


def test_an_encoder_with_scaled_positions_is_refused() -> None:
    config = {"model_type": "modernbert", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
              "intermediate_size": 8, "vocab_size": 8, "rope_parameters": {
                  "full_attention": {"rope_theta": 1e4, **YARN}, "sliding_attention": {"rope_theta": 1e4}}}  # fmt: skip
    with pytest.raises(LoadFailed, match="scaled positions"):
        shape_of(fold(config))
