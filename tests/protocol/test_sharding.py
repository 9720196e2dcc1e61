"""Architectures that can be divided are those of mlx-lm; what cannot be divided so is refused with its reason."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx_lm.models
import mlx_lm.utils
import pytest
from mlx_lm.models.pipeline import PipelineMixin

from protocol.group import NCCL, PIPELINE, PIPELINE_TYPES, RING, TENSOR, TENSOR_TYPES, indivisible_reason, resolve

MODELS = Path(mlx_lm.models.__path__[0])
BASE: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "hidden_size": 512, "intermediate_size": 1536,
}  # fmt: skip


def module_of(name: str) -> ModuleType:
    remapped: dict[str, str] = mlx_lm.utils.MODEL_REMAPPING
    return importlib.import_module(f"mlx_lm.models.{remapped.get(name, name)}")


def has_pipeline(name: str) -> bool:
    """Whether the class `Model` of a type, or one that it is made of, is of modules with a pipeline."""
    modules = {kind.__module__ for kind in module_of(name).Model.__mro__}
    kinds = (kind for module in modules for kind in vars(sys.modules[module]).values() if isinstance(kind, type))
    return any(hasattr(kind, "pipeline") and kind is not PipelineMixin for kind in kinds) or any(
        has_pipeline(parent) for parent in _parents(modules)
    )


def _parents(modules: set[str]) -> set[str]:
    """Types whose modules the modules take their models from."""
    known = {f"mlx_lm.models.{name}": name for name in PIPELINE_TYPES}
    taken = {
        value.__module__
        for module in modules
        for value in vars(sys.modules[module]).values()
        if isinstance(value, type)
    }
    return {known[module] for module in taken - modules if module in known}


def test_the_types_that_can_be_divided_are_those_of_mlx_lm() -> None:
    assert {name for name in TENSOR_TYPES if not hasattr(module_of(name).Model, "shard")} == set()
    assert {name for name in PIPELINE_TYPES if not has_pipeline(name)} == set()
    remapped: dict[str, str] = mlx_lm.utils.MODEL_REMAPPING
    known = {remapped.get(name, name) for name in TENSOR_TYPES}
    assert {file.stem for file in MODELS.glob("*.py") if "    def shard(self" in file.read_text()} <= known
    piped = {file.stem for file in MODELS.glob("*.py") if "PipelineMixin, nn.Module" in file.read_text()}
    assert piped <= {remapped.get(name, name) for name in PIPELINE_TYPES}


@pytest.mark.parametrize(
    ("changes", "parallel", "ranks", "words"),
    [
        ({}, TENSOR, 2, ""),
        ({"num_key_value_heads": 2}, TENSOR, 4, "num_key_value_heads = 2 cannot be divided by 4 ranks"),
        ({"num_attention_heads": 6}, TENSOR, 4, "num_attention_heads = 6 cannot be divided by 4 ranks"),
        ({"intermediate_size": 1537}, TENSOR, 2, "intermediate_size = 1537 cannot be divided by 2 ranks"),
        ({"quantization": {"group_size": 64, "bits": 4}}, TENSOR, 2, ""),
        ({"quantization": {"group_size": 512}}, TENSOR, 2, "no multiple of the quantization's group of 512"),
        ({"model_type": "gemma3_text"}, TENSOR, 2, "it needs one process"),
        ({}, PIPELINE, 2, "parallel = 'tensor' can be used"),
        ({"model_type": "qwen2"}, PIPELINE, 2, ""),
        ({"model_type": "qwen2"}, PIPELINE, 5, "4 layers are too few for 5 ranks"),
        ({"model_type": "qwen3_5", "num_key_value_heads": 2}, TENSOR, 4, ""),
        ({"model_type": "qwen3_5", "text_config": {"num_attention_heads": 3}}, TENSOR, 2, "num_attention_heads = 3"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_reason(
    changes: dict[str, Any], parallel: str, ranks: int, words: str
) -> None:
    reason = indivisible_reason(BASE | changes, parallel, ranks)
    assert (words in reason) if words else reason == ""


def test_auto_is_a_pipeline_over_a_ring_and_tensors_over_nccl() -> None:
    assert resolve({"model_type": "qwen2"}, "auto", "auto", has_cuda=False) == (PIPELINE, RING)
    assert resolve({"model_type": "qwen3"}, "auto", "auto", has_cuda=False) == (TENSOR, RING)
    assert resolve({"model_type": "qwen2"}, "auto", "auto", has_cuda=True) == (TENSOR, NCCL)
    assert "cannot send" in indivisible_reason(BASE | {"model_type": "qwen2"}, PIPELINE, 2, NCCL)
