"""Fingerprints of models for the disk cache depend on content, not on where or when the files were written."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.engine import spec
from tests.support.models import build, shallow
from worker.model.loader import load
from worker.prefix_cache.disk import CacheFormat
from worker.prefix_cache.fingerprint import model_form


def form(folder: Path, *, runs_code: bool = False) -> CacheFormat:
    return model_form(load(spec(folder), nothing), ["KVCache"], runs_code=runs_code)


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


@pytest.fixture
def model(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(model_folder("qwen3"), tmp_path / "model")


def test_a_copy_of_another_time_is_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert form(copy) == form(model)


def test_one_tensor_that_was_trained_is_another_model(model: Path) -> None:
    before, file = form(model), model / "model.safetensors"
    content, facts = bytearray(file.read_bytes()), file.stat()
    (length,) = struct.unpack("<Q", content[:8])
    tensors = {name: entry for name, entry in json.loads(content[8 : 8 + length]).items() if name != "__metadata__"}
    begin, end = tensors["model.layers.1.self_attn.k_norm.weight"]["data_offsets"]
    assert end - begin < 100, "the smallest there are"
    values = slice(8 + length + begin, 8 + length + end)
    content[values] = bytes(byte ^ 1 for byte in content[values])
    file.write_bytes(content)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert msgspec.structs.replace(form(model), weights=before.weights) == before
    assert form(model).weights != before.weights


def test_a_blob_of_the_hugging_face_cache_is_told_by_its_name(model: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    file, digest = model / "model.safetensors", "ab" * 32
    file.rename(blobs / digest)
    file.symlink_to(blobs / digest)
    named = form(model)
    build("qwen3", tmp_path / "other", seed=5, **shallow("qwen3"))
    (tmp_path / "other" / "model.safetensors").replace(blobs / digest)
    assert form(model) == named, "its name stands for its content"
    other = "cd" * 32
    (blobs / digest).rename(blobs / other)
    file.unlink()
    file.symlink_to(blobs / other)
    assert form(model).weights != named.weights


def test_code_of_the_model_counts_where_it_runs(model: Path) -> None:
    without, trusted = form(model), form(model, runs_code=True)
    (model / "modeling.py").write_text("SCALE = 2\n")
    assert form(model) == without
    assert form(model, runs_code=True).configuration != trusted.configuration
