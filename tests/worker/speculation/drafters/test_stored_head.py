"""Heads in checkpoints of each form become heads that compute what other implementations compute."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model, save_config, save_model

from tests.support.heads import NEXTN, build_with_head, build_with_layer
from tests.support.models import build
from worker.speculation.drafters.mtp_and_eagle_heads import NoHead, load_head


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("architecture", NEXTN)
def test_a_layer_behind_the_last_becomes_a_head(architecture: str, tmp_path: Path) -> None:
    """Its experts and its attention are stored as published; what it adds is 0, so it copies the embedding."""
    folder = build_with_layer(architecture, tmp_path / "model")
    module, config = NEXTN[architecture]
    model = module.Model(module.ModelArgs.from_dict(config))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(weights.items()))
    head = load_head(folder, config_of(folder), model)
    ids, hidden = mx.array([[20, 21, 22]]), mx.random.normal((1, 3, 64))
    state = head(ids, hidden, head.make_caches())
    embedded = model.model.embed_tokens(ids)
    copied = model.model.norm(mx.fast.rms_norm(embedded, None, 1e-6))
    assert mx.allclose(state, copied, atol=1e-4)
    assert mx.allclose(head.logits(state), model.lm_head(copied), atol=1e-3)


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next"])
def test_a_published_head_computes_what_that_of_mlx_vlm_does(architecture: str, tmp_path: Path) -> None:
    """Norms are stored less 1, and experts one by one."""
    from mlx_vlm.speculative.drafters import load_drafter

    folder = build(architecture, tmp_path / "model")
    model, config = load_model(folder)
    sizes = config.get("text_config", config)
    sizes |= {"rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                                  "mrope_section": [2, 1, 1]}}  # fmt: skip
    save_config(config, config_path=folder / "config.json")
    save_model(folder, model)
    inner: Any = getattr(model, "language_model", model)
    layer = next(each for each in inner.model.layers if not each.is_linear)
    flat: Any = tree_flatten(layer.parameters())
    size = sizes["hidden_size"]
    stored = {"mtp.fc.weight": mx.random.normal((size, 2 * size)) * 0.1}
    for name in ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"):
        stored[f"{name}.weight"] = mx.random.normal((size,)) * 0.1
    for name, array in flat:
        before, _, part = name.partition("switch_mlp.")
        if "norm" in name:
            array = array - 1.0
        each = {f"{before}experts.{at}.{part}": array[at] for at in range(len(array))} if part else {name: array}
        stored |= {f"mtp.layers.0.{key}": value for key, value in each.items()}
    mx.save_safetensors(str(folder / "mtp.safetensors"), stored, {"format": "pt"})
    ours = load_head(folder, config_of(folder), model)
    theirs, kind = load_drafter(str(folder))
    assert kind == "mtp"
    theirs.reset(model)
    ids, hidden = mx.array([[20, 21, 22, 23]]), mx.random.normal((1, 4, size))
    expected = theirs._forward_tokens(ids, hidden, mx.int32)
    assert mx.allclose(ours(ids, hidden, [KVCache()]), expected, atol=1e-3)


def test_a_checkpoint_without_a_head_has_none(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "model")
    model, config = load_model(folder)
    with pytest.raises(NoHead, match=r"^$"):
        load_head(folder, config, model)


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    folder = build_with_head("qwen3", tmp_path / "model")
    weights: dict[str, Any] = mx.load(str(folder / "mtp.safetensors"))  # pyright: ignore[reportAssignmentType]
    weights["mtp.fc.scales"] = mx.zeros((64, 2))
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights)
    model, config = load_model(folder)
    with pytest.raises(NoHead, match="quantized"):
        load_head(folder, config, model)


@pytest.mark.parametrize("architecture", ["glm4_moe_lite", "glm_moe_dsa"])
def test_a_head_that_mlx_vlm_has_taken_out_is_the_one_in_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter

    folder = build_with_layer(architecture, tmp_path / "model")
    config = config_of(folder) | {"num_nextn_predict_layers": 1}
    save_config(config, config_path=folder / "config.json")
    splitter: Any = get_mtp_splitter(source_config=config)
    splitter.split(str(folder), str(tmp_path / "alone"))
    module, _ = NEXTN[architecture]
    model = module.Model(module.ModelArgs.from_dict(config))
    inside, alone = (load_head(folder, config, model, beside) for beside in (None, tmp_path / "alone"))
    ids, hidden = mx.array([[20, 21, 22]]), mx.random.normal((1, 3, 64))
    states = [head(ids, hidden, head.make_caches()) for head in (inside, alone)]
    assert mx.allclose(*states, atol=1e-2)  # it may be written in fewer bits
    assert config_of(tmp_path / "alone")["model_type"] == f"{architecture}_mtp"
