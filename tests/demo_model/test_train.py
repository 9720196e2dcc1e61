"""The commands that make what ships, each in small on a CPU, and what the model learns from a conversation."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import generate, load

from tests.demo_model.conftest import REPOSITORY
from tests.support.demo_answers import SHIPPED
from tests.support.scale import patient


def made(module: str, folder: Path) -> Path:
    command = [sys.executable, "-m", f"deploy.{module}", "--smoke", "--out", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=patient(600))
    shipped = {path.name for path in SHIPPED.with_name(module).iterdir()}
    assert {path.name for path in folder.iterdir()} == shipped - {"README.md"}
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("module", ["demo_model", "demo_vision"])
def test_the_command_writes_a_model_that_mlx_lm_runs(module: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="training needs PyTorch, which mlxd itself does not")
    model, wrapped = load(str(made(module, tmp_path)))[:2]
    assert isinstance(generate(model, wrapped, "<|im_start|>user\nhi<|im_end|>\n", max_tokens=4), str)


@pytest.mark.soak
def test_the_command_writes_an_adapter_of_the_shipped_shapes(tmp_path: Path) -> None:
    weights, shipped = (
        mx.load(str(folder / "adapters.safetensors"))
        for folder in (made("demo_adapter", tmp_path), SHIPPED.with_name("demo_adapter"))
    )
    assert {name: weight.shape for name, weight in weights.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }


def test_only_the_assistants_words_are_learned() -> None:
    pytest.importorskip("torch", reason="training needs PyTorch, which mlxd itself does not")
    import numpy as np
    from tokenizers import Tokenizer

    from deploy.demo_model import tokenizer, training

    bpe = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    marks = {mark: bpe.token_to_id(mark) for mark in (*tokenizer.SPECIAL, *tokenizer.MARKS)}
    marks["assistant"] = bpe.encode("<|im_start|>assistant\n").ids[1]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>\n"
    wanted = training.targets(np.array(bpe.encode(text).ids), marks, last_only=False).tolist()
    learned = [token for token in wanted if token != training.IGNORED]
    assert bpe.decode(learned, skip_special_tokens=False) == "Hello<|im_end|>"
