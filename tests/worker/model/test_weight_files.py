"""Weight files: what the index names is what is served, in a folder of any name; what is ambiguous is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from gateway.config.settings import SamplingDefaults
from gateway.model_files.metadata import FactsReader, Unreadable, inspect, read_weights
from gateway.request.routing import recommended
from protocol.failures import Code
from protocol.model_files import weights_digest
from tests.support.audio_models import build_moonshine, build_qwen_tts, build_whisper
from tests.support.engine import spec
from tests.support.models import build
from tests.support.reading_models import build_embedder
from worker.audio.audio_model import load_audio_model
from worker.embedding.backbones import DecoderBackbone, load_backbone
from worker.embedding.load_model import EmbeddingInput, load_embedding_model
from worker.errors import LoadFailed
from worker.model.checkpoint_view import CONFIG, checkpoint_view, files_of
from worker.model.loader import check_weights, load, read_config

INDEX = "model.safetensors.index.json"
STRAYS = (
    "model 2.safetensors", "model.old.safetensors", "model-00001-of-00001.safetensors", "model-bf16.safetensors",
    "._model.safetensors", "consolidated.safetensors", "model copy.safetensors", "a.safetensors",
)  # fmt: skip
IDS = [[20, 27, 34, 41, 48]]


@pytest.fixture
def folder(tmp_path: Path, model_folder: Callable[[str], Path]) -> Path:
    copied = tmp_path / "model"
    shutil.copytree(model_folder("qwen3"), copied)
    return copied


def tensors(folder: Path, name: str = "model.safetensors") -> dict[str, mx.array]:
    loaded: Any = mx.load(str(folder / name))
    return loaded


def add_others(folder: Path, name: str) -> None:
    """A file with other numbers under the names of the model's tensors."""
    mx.save_safetensors(str(folder / name), {key: array * 0 + 1e-3 for key, array in tensors(folder).items()})


def logits(folder: Path) -> mx.array:
    return load(spec(folder), lambda _stage, _done, _total: None).model(mx.array(IDS))


def refused(folder: Path, code: Code) -> str:
    with pytest.raises(LoadFailed) as caught:
        logits(folder)
    assert caught.value.failure.code is code
    return caught.value.failure.message


@pytest.mark.parametrize("stray", STRAYS)
def test_files_that_the_index_does_not_name_are_not_loaded_nor_counted(folder: Path, stray: str) -> None:
    expected, digest = logits(folder), weights_digest(folder)
    size = inspect(folder, "auto", 0, 1 << 40).weights_bytes
    add_others(folder, stray)
    assert mx.array_equal(logits(folder), expected).item()
    assert weights_digest(folder) == digest
    assert inspect(folder, "auto", 0, 1 << 40).weights_bytes == size


def test_a_decoder_that_embeds_is_loaded_from_the_files_that_the_index_names(folder: Path) -> None:
    def hidden() -> mx.array:
        backbone = load_backbone(folder, read_config(folder), False, is_scoring=False)
        assert isinstance(backbone, DecoderBackbone)
        return backbone.hidden(mx.array(IDS), [len(IDS[0])], None)

    expected = hidden()
    add_others(folder, "model 2.safetensors")
    assert mx.array_equal(hidden(), expected).item()


@pytest.mark.parametrize("other", ["model 2.safetensors", "model.old.safetensors", "model-00001-of-00001.safetensors"])
def test_without_an_index_a_tensor_in_two_files_is_refused_with_their_names(folder: Path, other: str) -> None:
    (folder / INDEX).unlink()
    add_others(folder, other)
    reason = refused(folder, Code.MODEL_CORRUPT)
    assert "model.safetensors" in reason
    assert other in reason
    with pytest.raises(Unreadable, match="twice"):
        read_weights(folder, "auto")


def test_without_an_index_files_of_different_tensors_are_parts_of_one_model(folder: Path) -> None:
    expected = logits(folder)
    parts = list(tensors(folder).items())
    (folder / INDEX).unlink()
    mx.save_safetensors(str(folder / "model-a.safetensors"), dict(parts[::2]))
    mx.save_safetensors(str(folder / "model-b.safetensors"), dict(parts[1::2]))
    (folder / "model.safetensors").unlink()
    assert mx.array_equal(logits(folder), expected).item()


def test_copies_of_other_formats_beside_the_weights_are_left_out(folder: Path) -> None:
    expected = logits(folder)
    (folder / INDEX).unlink()
    add_others(folder, "model.fp32-00001-of-00002.safetensors")
    add_others(folder, "model.fp16.safetensors")
    assert mx.array_equal(logits(folder), expected).item()


def test_a_tensor_in_two_files_of_an_index_is_refused(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    names = list(tensors(folder))
    weight_map = {name: "model-2.safetensors" if at % 2 else "model.safetensors" for at, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "twice" in refused(folder, Code.MODEL_CORRUPT)


def test_a_file_or_a_tensor_of_the_index_that_is_not_there_is_named(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    weight_map = index["weight_map"]
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "extra.weight": "model.safetensors"}}))
    assert "extra.weight" in refused(folder, Code.MODEL_CORRUPT)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**weight_map, "extra.weight": "model-2.safetensors"}}))
    assert "lacks 1 weight file(s), such as model-2.safetensors" in refused(folder, Code.MODEL_MISSING)
    with pytest.raises(Unreadable, match=r"model-2\.safetensors"):
        read_weights(folder, "auto")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 5}}', "[", '{"weight_map": []}'])
def test_an_index_that_names_no_files_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert INDEX in refused(folder, Code.MODEL_CORRUPT)


@pytest.mark.parametrize("name", ["b[12]", "Demo [4bit]", "a*", "what?", "a#b%c&d$(x) 'q' \"r\" [*]?", "[[]", "**"])
def test_a_folder_whose_name_is_a_pattern_holds_its_own_weights(tmp_path: Path, name: str) -> None:
    own = build("qwen3", tmp_path / "plain")
    expected = logits(own)
    shutil.copytree(own, tmp_path / name)
    for neighbour in ("b1", "a", "ab", "what!"):
        build("qwen3", tmp_path / neighbour, seed=1)
    assert mx.array_equal(logits(tmp_path / name), expected).item()


def test_a_link_to_a_folder_whose_name_is_a_pattern_is_loaded(tmp_path: Path) -> None:
    own = build("qwen3", tmp_path / "c[12]")
    build("qwen3", tmp_path / "c1", seed=1)
    (tmp_path / "link").symlink_to(own)
    shutil.copytree(own, tmp_path / "plain")
    assert mx.array_equal(logits(tmp_path / "link"), logits(tmp_path / "plain")).item()


@pytest.mark.parametrize("make", [build_whisper, build_moonshine, build_qwen_tts])
def test_an_audio_model_is_loaded_from_its_own_files_alone(tmp_path: Path, make: Callable[..., Path]) -> None:
    folder = tmp_path / "a[12]"
    make(folder)
    make(tmp_path / "a1", seed=1)
    expected = weight_sum(folder)
    index = {"weight_map": dict.fromkeys(tensors(folder), "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    for stray in STRAYS:
        add_others(folder, stray)
    assert weight_sum(folder) == expected


def weight_sum(folder: Path) -> Any:
    """The sum of the absolute weights of an audio model, as loaded."""
    model = load_audio_model(spec(folder), lambda _stage, _done, _total: None)
    part: Any = model.transcriber or model.speaker
    flat: Any = tree_flatten(part._model.parameters())
    return sum(mx.abs(array).sum().item() for _, array in flat)


def test_an_audio_model_of_transformers_5_is_loaded_with_its_own_rotary_embedding(tmp_path: Path) -> None:
    folder = build_moonshine(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    model: Any = load_audio_model(spec(folder), lambda _stage, _done, _total: None)
    config = model.transcriber._model.config
    assert (config.rope_theta, config.partial_rotary_factor) == (5e5, 0.5)


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_an_embedder_is_loaded_from_its_own_files_alone(tmp_path: Path, family: str) -> None:
    def vector(folder: Path) -> Any:
        model = load_embedding_model(spec(folder), "embed", lambda _stage, _done, _total: None)
        return model.compute([EmbeddingInput((5, 6, 7))]).tolist()

    folder = build_embedder(family, tmp_path / "a[12]")
    shutil.copytree(folder, tmp_path / "plain")
    expected = vector(tmp_path / "plain")
    index = {"weight_map": dict.fromkeys(tensors(folder), "model.safetensors")}
    (folder / INDEX).write_text(json.dumps(index))
    for stray in STRAYS:
        add_others(folder, stray)
    assert vector(folder) == expected


def test_a_view_shows_other_loaders_what_is_meant_and_leaves_nothing_behind(folder: Path) -> None:
    for stray in STRAYS:
        add_others(folder, stray)
    inner = folder / "speech [1]"
    inner.mkdir()
    shutil.copy(folder / "model.safetensors", inner)
    add_others(folder, f"{inner.name}/._model.safetensors")
    with checkpoint_view(folder, {CONFIG: {"model_type": "other"}}) as view:
        assert [file.name for file in view.glob("*.safetensors")] == ["model.safetensors"]
        assert [file.name for file in (view / inner.name).iterdir()] == ["model.safetensors"]
        assert json.loads((view / "config.json").read_text()) == {"model_type": "other"}
        assert view.parts[-len(folder.parts) + 1 :] == folder.parts[1:]
        lazy = tensors(view)
    assert not view.exists()
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    assert all(mx.array_equal(array, lazy[name]).item() for name, array in tensors(folder).items())


def test_weights_of_a_drafter_may_have_any_name_and_are_in_one_place(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model.safetensors").rename(folder / "head.safetensors")
    assert files_of(folder) == [folder / "head.safetensors"]
    shutil.copy(folder / "head.safetensors", folder / "head 2.safetensors")
    with pytest.raises(LoadFailed, match="twice"):
        check_weights(folder, files_of)


def test_a_folder_in_place_of_weights_counts_as_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    (folder / INDEX).unlink()
    assert "no model*.safetensors" in refused(folder, Code.MODEL_MISSING)


def test_an_index_whose_link_is_broken_is_missing_and_not_absent(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / INDEX).symlink_to(folder / "gone")
    assert f"lacks {INDEX}" in refused(folder, Code.MODEL_MISSING)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_file_whose_read_may_not_end_is_refused_instead_of_read(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert f"{name} is not a regular file" in refused(folder, Code.MODEL_CORRUPT)
    assert recommended(str(folder)) == SamplingDefaults()
    FactsReader().read(str(folder))
    if name in ("model.safetensors", "config.json"):
        with pytest.raises(Unreadable):
            inspect(folder, "auto", 0, 1 << 40)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_of_absurd_depth_is_refused_by_worker_and_gateway(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    assert "nested too deeply" in refused(folder, Code.MODEL_CORRUPT)
    with pytest.raises(Unreadable, match="nested too deeply"):
        inspect(folder, "auto", 0, 1 << 40)
