"""Files as a class of mlx-lm takes them: a head of its own is used, no layer computes with whole numbers, and an
activation that the class does not have is refused.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from protocol.failures import Code
from tests.support.engine import spec
from tests.support.models import build
from worker.errors import LoadFailed
from worker.model.class_checks import check_head, untied
from worker.model.loader import load

IDS = [[20, 27, 34, 41, 48]]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNSET = object()


def logits(folder: Path) -> mx.array:
    return load(spec(folder), lambda _stage, _done, _total: None).model(mx.array(IDS))


def rewrite(folder: Path, **changes: Any) -> None:
    """Change tensors of a model, by names in which `__` is a dot, and remove its index."""
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    arrays = {**loaded, **{name.replace("__", "."): array for name, array in changes.items()}}
    mx.eval(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def configure(folder: Path, key: str, value: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {name: each for name, each in config.items() if name != key} | ({} if value is UNSET else {key: value})
    (folder / "config.json").write_text(json.dumps(config))


def tensor(folder: Path, name: str) -> mx.array:
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    return loaded[name]


@pytest.mark.parametrize("stated", [True, UNSET, None])
def test_a_head_that_differs_from_the_embedding_is_used_whatever_the_configuration_says(
    tmp_path: Path, stated: Any
) -> None:
    folder = build("llama", tmp_path / "model", num_hidden_layers=2)  # mlx-lm's class ties them where nothing is stated
    tied = logits(folder)
    rewrite(folder, lm_head__weight=tensor(folder, EMBEDDING) * -2)
    configure(folder, "tie_word_embeddings", False)
    expected = logits(folder)
    assert mx.allclose(expected, tied * -2, atol=1e-4).item()
    configure(folder, "tie_word_embeddings", stated)
    assert mx.array_equal(logits(folder), expected).item()


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (False, True), (True, True), (None, None)])
def test_a_head_of_its_own_counts_where_two_sections_contradict_each_other(
    tmp_path: Path, outer: bool | None, inner: bool | None
) -> None:
    folder = build("qwen3", tmp_path / "model", num_hidden_layers=2)
    config = {"tie_word_embeddings": outer, "text_config": {"tie_word_embeddings": inner}}
    assert untied(folder, config) == config
    rewrite(folder, lm_head__weight=tensor(folder, EMBEDDING) * -2)
    assert untied(folder, config) == {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}


def test_a_copy_of_the_embedding_as_the_head_is_no_other_head(tmp_path: Path) -> None:
    folder = build("llama", tmp_path / "model", num_hidden_layers=2)
    expected = logits(folder)
    rewrite(folder, lm_head__weight=tensor(folder, EMBEDDING))
    assert mx.array_equal(logits(folder), expected).item()


def test_a_head_that_the_class_has_no_place_for_is_refused(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "model", num_hidden_layers=2)
    rewrite(folder, lm_head__weight=tensor(folder, EMBEDDING) * -2)
    stated = {"tie_word_embeddings": True}
    changed = untied(folder, stated)
    assert changed == {"tie_word_embeddings": False}
    with pytest.raises(LoadFailed, match="lm_head that differs from its embedding") as caught:
        check_head(folder, nn.Sequential(nn.Embedding(4, 4)), changed, stated)
    assert caught.value.failure.code is Code.MODEL_UNSUPPORTED


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", EMBEDDING, "model.norm.weight"])
@pytest.mark.parametrize("dtype", [mx.uint8, mx.int32])
def test_weights_that_mlx_reads_as_whole_numbers_are_refused(tmp_path: Path, name: str, dtype: mx.Dtype) -> None:
    folder = build("qwen3", tmp_path / "model", num_hidden_layers=2)
    rewrite(folder, **{name.replace(".", "__"): tensor(folder, name).astype(dtype)})
    with pytest.raises(LoadFailed, match=f"{name} in .*int") as caught:
        logits(folder)
    assert caught.value.failure.code is Code.MODEL_UNSUPPORTED


@pytest.mark.parametrize(("name", "is_served"), [("relu", False), ("gelu", False), ("silu", True), ("swish", True)])
def test_an_activation_that_the_class_does_not_have_is_refused(tmp_path: Path, name: str, is_served: bool) -> None:
    folder = build("llama", tmp_path / "model", num_hidden_layers=2)
    configure(folder, "hidden_act", name)
    if is_served:
        logits(folder)
        return
    with pytest.raises(LoadFailed, match=f"hidden_act = '{name}'") as caught:
        logits(folder)
    assert caught.value.failure.code is Code.MODEL_UNSUPPORTED


def test_end_of_sequence_tokens_are_read_from_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "model", num_hidden_layers=2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}), encoding="utf-8-sig")
    assert {0, 1} <= set(load(spec(folder), lambda _stage, _done, _total: None).eos_ids)


def test_a_tensor_that_the_class_does_not_have_is_named(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "model", num_hidden_layers=2)
    rewrite(folder, foo__bar=mx.zeros(2))
    with pytest.raises(LoadFailed, match=r"Received 1 parameters not in model: foo\.bar"):
        logits(folder)


@pytest.mark.parametrize(
    ("family", "settings", "is_warned"),
    [
        ("llama", {"sliding_window": 16}, True),
        ("llama", {"sliding_window": 1 << 20}, False),
        ("llama", {"sliding_window": None}, False),
        ("qwen3", {"sliding_window": 16}, False),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True}, True),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": False}, False),
        ("llama", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}, False),
        ("llama", {"sliding_window": 16, "layer_types": ["full_attention", "full_attention"]}, False),
    ],
)
def test_a_window_that_the_class_does_not_compute_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, settings: dict[str, Any], is_warned: bool
) -> None:
    folder = build(family, tmp_path / "model", num_hidden_layers=2)
    for key, value in settings.items():
        configure(folder, key, value)
    with caplog.at_level("WARNING", "mlxd.worker"):
        logits(folder)
    assert ("sliding window of 16 tokens" in caplog.text) is is_warned
