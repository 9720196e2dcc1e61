"""Facts from a model's files: counted exactly where they can be, and left out where they cannot."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.model_files.metadata import FactsReader, ModelFacts, TensorEntry, parameters
from worker.prompt.infill import _forms


def tensor(dtype: str, *shape: int) -> TensorEntry:
    return TensorEntry(dtype, shape, (0, 0))


# 8 × 64 weights in 4 bits: 8 numbers in each of 32 bits.
PACKED = {"a.weight": tensor("U32", 8, 8), "a.scales": tensor("F16", 8, 2), "a.biases": tensor("F16", 8, 2)}
PLAIN = {"norm.weight": tensor("BF16", 64), "b.weight": tensor("F32", 3, 5), "b.biases": tensor("F32", 3)}


def test_parameters_of_quantized_layers_are_counted_as_before_they_were_packed() -> None:
    assert parameters(PACKED | PLAIN, {"group_size": 32, "bits": 4}) == 8 * 64 + 64 + 15 + 3


def test_a_layer_may_have_a_group_size_of_its_own() -> None:
    assert parameters(PACKED, {"group_size": 64, "bits": 8, "a": {"group_size": 32, "bits": 4}}) == 8 * 64


def test_forms_of_weights_that_are_not_known_are_not_counted() -> None:
    assert parameters(PACKED, {}) is None
    assert parameters(PACKED, {"group_size": 31}) is None
    assert parameters({"a.weight": tensor("U32", 8, 8)}, {"group_size": 32}) is None
    assert parameters({"a.blocks": tensor("U8", 8, 8), "a.scales": tensor("U8", 8)}, {"group_size": 32}) is None


def test_the_demo_model_is_described_by_its_files() -> None:
    facts = FactsReader().read("demo")

    # Its embeddings are tied; numbers have two bytes, those of the norms four.
    norms = 8 * (2 * 320 + 2 * 64) + 320
    assert (facts.parameters, facts.size_bytes) == (10_656_064, 2 * 10_656_064 + 2 * norms)
    assert (facts.architecture, facts.context, facts.bits) == ("qwen3", 32768, None)
    assert "tools" in facts.chat_template


def test_a_download_that_goes_on_and_a_changed_folder_are_read_again(tmp_path: Path) -> None:
    reader = FactsReader()

    def read() -> ModelFacts:
        facts = reader.read(str(tmp_path))
        assert facts.modified_s == (tmp_path / "config.json").stat().st_mtime_ns / 1e9
        return replace(facts, modified_s=0.0)

    assert reader.read(str(tmp_path)) == ModelFacts()
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "x", "quantization": {"bits": 4}}')
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default", "template": "T"}]}')
    assert read() == ModelFacts("x", bits=4, chat_template="T")

    header = b'{"w": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert read() == ModelFacts("x", parameters=2, size_bytes=4, bits=4, chat_template="T")
    config.write_text('{"model_type": "y", "quantization": 4, "n_ctx": 7}')
    os.utime(config, ns=(1, 1))
    assert read() == ModelFacts("y", 7, 2, 4, chat_template="T")


@pytest.mark.parametrize("is_list", [True, False])
def test_a_template_for_tools_shows_that_tools_are_rendered(tmp_path: Path, is_list: bool) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    named = {"rag": "documents", "default": "plain", "tool_use": "tools"}
    if is_list:
        listed = [{"name": name, "template": text} for name, text in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    else:
        additional = tmp_path / "additional_chat_templates"
        additional.mkdir()
        (tmp_path / "chat_template.jinja").write_text(named["default"])
        for name in ("rag", "tool_use"):
            (additional / f"{name}.jinja").write_text(named[name])
    facts = FactsReader().read(str(tmp_path))
    assert (facts.chat_template, facts.tool_template, facts.templates) == ("plain", "tools", "plaintools")


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("form", _forms())
def test_a_vocabulary_to_fill_in_the_middle_is_seen_for_each_form_that_workers_know(
    tmp_path: Path, form: Any, name: str, is_ascii: bool
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    content = tmp_path / name
    content.write_text('{"added_tokens": [{"content": "<s>"}]}')
    assert not FactsReader().read(str(tmp_path)).fills_middle
    content.write_text(json.dumps({"added_tokens": [{"content": form.order[0][0]}]}, ensure_ascii=is_ascii))
    assert FactsReader().read(str(tmp_path)).fills_middle
