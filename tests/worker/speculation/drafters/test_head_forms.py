"""Heads of each family that is run: their tensors are found as published, and fed in the order of their family."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model

from protocol.checkpoint import SUPPORTED_TYPES, is_head, unused
from protocol.model_files import INDEX
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB, write
from tests.worker.engine.test_exact import requests, tokens
from worker.model.loader import LoadedModel
from worker.speculation.drafters.mtp_and_eagle_heads import FORMS, NoHead, load_head
from worker.start.checked_model import load_checked
from worker.tools.verify.verifier import EagerDrafts

CONFIGURATIONS = json.loads((Path(__file__).parents[3] / "support" / "architectures.json").read_text())
SIZE = 64


def _as_stored(name: str) -> str:
    return name


def _experts(name: str) -> str:
    return name.replace("mlp.gate.gate_proj.", "mlp.gate.")


@dataclass(frozen=True)
class Family:
    """Names of a family's head, and the layer of the tiny target that is of the kind of the head's."""

    prefix: str
    # Of the projection, of the norms of the embedding and of the state, and of the last norm.
    fc: str
    enorm: str
    hnorm: str
    norm: str
    layer: str
    like: int
    changes: dict[str, Any]
    stored: Callable[[str], str] = _as_stored
    is_hidden_first: bool = False
    is_raw: bool = False
    lm_head: str = ""
    # Of a second layer, where such checkpoints have more: the first is run.
    second: str = ""


FAMILIES = {
    "mimo": Family("model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", "",
                   3, {}, is_hidden_first=True, second="model.mtp_layers.1.input_proj.weight"),
    "mimo_v2_flash": Family("model.mtp.layers.0.", "eh_proj", "enorm", "hnorm", "final_layernorm", "", 1,
                            {"moe_layer_freq": [0, 0, 0, 1], "sliding_window_size": 8},
                            lambda name: name.replace("post_attention_layernorm", "pre_mlp_layernorm"),
                            second="model.mtp.layers.1.eh_proj.weight"),
    "ernie4_5_moe": Family("model.", "mtp_linear_proj.0", "mtp_emb_norm.0", "mtp_hidden_norm.0", "", "mtp_block.0.", 0,
                           {"moe_layer_start_index": 1, "moe_intermediate_size": 64},
                           second="model.mtp_linear_proj.1.weight"),
    "exaone_moe": Family("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0.", 0,
                         {"sliding_window": 8}),
    "step3p5": Family("model.layers.4.", "eh_proj", "enorm", "hnorm", "shared_head.norm", "transformer.", 1,
                      {"moe_layers_enum": "2,3", "sliding_window": 8},
                      is_raw=True, lm_head="shared_head.output.weight", second="model.layers.5.eh_proj.weight"),
    "longcat_flash": Family("model.mtp.layers.0.", "eh_proj", "enorm.m", "hnorm.m", "", "", 0, {},
                            second="model.mtp.layers.1.eh_proj.weight"),
    "bailing_moe": Family("model.layers.4.", "eh_proj", "enorm", "hnorm", "final_layernorm", "", 3, {}, _experts),
}  # fmt: skip


def write_target(kind: str, folder: Path) -> Any:
    module = import_module(f"mlx_lm.models.{kind}")
    write(module, {**CONFIGURATIONS[kind], **FAMILIES[kind].changes}, folder)
    return load_model(folder)[0]


def _layer(kind: str, model: Any) -> list[tuple[str, mx.array]]:
    """Weights of the target's layer that the head's is like, by their names there."""
    layer = model.layers[FAMILIES[kind].like]
    if kind != "longcat_flash":
        flat: Any = tree_flatten(layer.parameters())
        return flat
    flat = tree_flatten(layer.self_attn[0].parameters())
    attention = {f"self_attn.{name}": weight for name, weight in flat}
    keys, values = attention.pop("self_attn.embed_q.weight"), attention.pop("self_attn.unembed_out.weight")
    attention["self_attn.kv_b_proj.weight"] = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1).reshape(-1, 16)
    flat = tree_flatten(layer.mlps[0].parameters())
    dense = {f"transformer_layer.mlp.{name}": weight for name, weight in flat}
    norms = {f"{name}.weight": layer[name][0].weight for name in ("input_layernorm", "post_attention_layernorm")}
    return list((attention | dense | norms).items())


def _run(kind: str, model: Any, x: mx.array, mask: mx.array) -> mx.array:
    layer = model.layers[FAMILIES[kind].like]
    if kind != "longcat_flash":
        return layer(x, mask, cache=KVCache())
    x = x + layer.self_attn[0](layer.input_layernorm[0](x), mask, KVCache())
    return x + layer.mlps[0](layer.post_attention_layernorm[0](x))


def write_head(kind: str, folder: Path, model: Any, *, scale: float) -> dict[str, mx.array]:
    """A random head as published, whose layer is one of the target's, times `scale` where it adds; its own parts."""
    family, parts = FAMILIES[kind], dict[str, mx.array]()
    mx.random.seed(4)
    parts["fc"] = mx.random.normal((SIZE, 2 * SIZE)) * 0.1
    for name in ("enorm", "hnorm", *(["norm"] if family.norm or kind == "longcat_flash" else [])):
        parts[name] = 1 + mx.random.normal((SIZE,)) * 0.1
    if scale == 0:  # which hands the embedding through
        eye = [mx.eye(SIZE), mx.zeros((SIZE, SIZE))]
        parts["fc"] = mx.concatenate(eye[::-1] if family.is_hidden_first else eye, axis=1)
        parts |= {"enorm": mx.ones((SIZE,))} | ({"norm": model.model.norm.weight} if "norm" in parts else {})
    less = 1.0 if family.is_raw else 0.0
    stored = {family.prefix + getattr(family, name): weight - less * (weight.ndim == 1)
              for name, weight in parts.items() if getattr(family, name)}  # fmt: skip
    stored = {f"{name}.weight": weight for name, weight in stored.items()}
    if kind == "longcat_flash":  # beside its layers
        stored["model.mtp.norm.weight"] = parts["norm"]
        stored["model.mtp.embed_tokens.weight"] = model.model.embed_tokens.weight
    if family.lm_head:
        stored[family.prefix + family.lm_head] = model.lm_head.weight
    for name, weight in _layer(kind, model):
        adds = ("o_proj.weight", "down_proj.weight", "dense.weight")
        weight = weight * scale if name.endswith(adds) else weight
        begin, _, part = name.partition("switch_mlp.")
        each = {f"{begin}experts.{at}.{part}": weight[at] for at in range(len(weight))} if part else {name: weight}
        for key, own in each.items():
            own = own - less if own.ndim == 1 and "norm" in key else own
            stored[family.prefix + family.layer + family.stored(key)] = own
    if family.second:
        stored[family.second] = mx.zeros((1,))
    # mlx-lm's class of Bailing does not leave a head out: one that was taken out of the files lies beside them.
    name = "mtp.safetensors" if kind == "bailing_moe" else "model-head.safetensors"
    mx.save_safetensors(str(folder / name), stored, {"format": "pt"})
    (folder / INDEX).unlink(missing_ok=True)  # which names the other file alone
    return parts


def test_the_families_are_those_that_are_told_to_be_run() -> None:
    assert set(FORMS) == SUPPORTED_TYPES
    assert all(unused(kind) == "" for kind in SUPPORTED_TYPES)
    assert unused("kimi_k3") == "its head is there and not used: those of kimi_k3 are not run"
    for name in ("mtp.fc.weight", "model.mtp_layers.0.input_proj.weight", "model.layers.61.eh_proj.weight"):
        assert is_head(name)
    for name in ("model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.smtp.weight"):
        assert not is_head(name)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_published_head_is_fed_and_run_as_its_family_is(kind: str, tmp_path: Path) -> None:
    """Its layer is the target's own, so that one says what the other must."""
    family, model = FAMILIES[kind], write_target(kind, tmp_path / "model")
    parts = write_head(kind, tmp_path / "model", model, scale=1.0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    head = load_head(tmp_path / "model", config, model)
    ids, states = mx.array([[20 + at for at in range(12)]]), mx.random.normal((1, 12, SIZE))
    eps = config.get("rms_norm_eps") or config["layernorm_epsilon"]
    table = model.model.word_embeddings if kind == "bailing_moe" else model.model.embed_tokens
    fed = states if family.is_raw else model.model.norm(states)
    pair = [mx.fast.rms_norm(table(ids), parts["enorm"], eps), mx.fast.rms_norm(fed, parts["hnorm"], eps)]
    x = mx.concatenate(pair[::-1] if family.is_hidden_first else pair, axis=-1) @ parts["fc"].T
    at = mx.arange(12)
    is_sliding = kind in ("mimo_v2_flash", "exaone_moe", "step3p5")
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - (8 if is_sliding else 99))
    state = _run(kind, model, x, mask)
    normed = mx.fast.rms_norm(state, parts["norm"], eps) if "norm" in parts else state
    ours = head(ids, head.hidden(states), head.make_caches())
    assert mx.allclose(ours, state if family.is_raw else normed, atol=1e-4)
    assert mx.allclose(head.logits(ours), model.lm_head(normed), atol=1e-3)


def test_a_head_s_layer_is_of_the_kind_that_its_configuration_lists_behind_the_others() -> None:
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
             "rope_theta": [1.0, 2.0, 3.0], "partial_rotary_factors": [0.1, 0.2, 0.3]}  # fmt: skip
    changed = FORMS["step3p5"].changes(sizes)
    assert (changed["layer_types"], changed["rope_theta"]) == (["full_attention"], [3.0])
    changed = FORMS["step3p5"].changes({**sizes, "layer_types": ["full_attention", "sliding_attention"]})
    assert (changed["layer_types"], changed["partial_rotary_factors"]) == (["sliding_attention"], [0.2])


def eager(loaded: LoadedModel) -> EagerDrafts:
    assert loaded.proposer is not None, loaded.no_head
    return EagerDrafts(loaded.proposer, 3)


@pytest.mark.soak
@pytest.mark.parametrize("kind", FAMILIES)
def test_rows_with_drafts_of_such_a_head_equal_each_alone_without(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_head(kind, folder, write_target(kind, folder), scale=0.0)
    batch = requests(6)
    with EngineHarness(spec(folder, speculate="off")) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
    with EngineHarness(spec(folder), drafter=eager) as engine:
        assert [tokens(result) for result in engine.run(batch)] == alone
        drafts = engine.drafter
    assert isinstance(drafts, EagerDrafts)
    assert drafts.drafted > 50


def test_a_head_that_is_not_run_is_named_where_the_model_is_served(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(import_module("mlx_lm.models.bailing_hybrid"), CONFIGURATIONS["bailing_hybrid"], folder)
    mx.save_safetensors(str(folder / "model-head.safetensors"), {"model.layers.4.eh_proj.weight": mx.zeros((SIZE,))})
    (folder / INDEX).unlink()
    with EngineHarness(spec(folder)) as engine:
        assert engine.engine.speculation == (
            "auto, without the checkpoint's head for multi-token prediction: "
            "its head is there and not used: those of bailing_hybrid are not run"
        )
        assert engine.run([Generate(1, TokensPrompt((20, 21)), Sampling(), 3)])[0].terminals == 1


def test_a_head_whose_weights_are_in_another_form_does_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = write_target("mimo", folder)
    write_head("mimo", folder, model, scale=1.0)
    weights: Any = mx.load(str(folder / "model-head.safetensors"))
    weights["model.mtp_layers.0.input_proj.weight"] = mx.zeros((SIZE, 2 * SIZE), dtype=mx.uint8)
    mx.save_safetensors(str(folder / "model-head.safetensors"), weights, {"format": "pt"})
    with pytest.raises(NoHead, match="its weights are in a form that is not read"):
        load_head(folder, json.loads((folder / "config.json").read_text()), model)
    assert "form that is not read" in load_checked(spec(folder), lambda *_: None).no_head
    assert model.model.embed_tokens.weight.shape[0] == VOCAB
