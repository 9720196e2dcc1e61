"""A hub of models that can be used here, that are too large and that MLX does not load, and a cache for them."""

import json
import struct
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.support.hub import Hub, Repo, model_repo

HUGE = 2**50


def too_large() -> Repo:
    """A repository whose weights, by their header, no machine holds."""
    header = json.dumps({"w": {"dtype": "U32", "shape": [HUGE // 4], "data_offsets": [0, HUGE]}}).encode()
    config = {"model_type": "qwen3", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
    weights = struct.pack("<Q", len(header)) + header
    return Repo({"config.json": json.dumps(config).encode(), "model.safetensors": weights}, downloads=900)


@pytest.fixture
def hub(model_folder: Callable[[str], Path]) -> Generator[Hub, None, None]:
    tiny = model_repo(model_folder("qwen3"))
    repos = {
        "mlx-community/tiny-qwen3": Repo(tiny.files, downloads=70),
        "org/tiny-qwen3-too": Repo(tiny.files, downloads=80),
        "org/huge-qwen3": too_large(),
        "org/foreign-qwen3": Repo({"config.json": b'{"model_type": "unheard_of"}'}, downloads=1000),
        "org/gguf-qwen3": Repo({"config.json": b'{"model_type": "qwen3"}', "model.gguf": b"x"}, downloads=5),
        "org/gated-qwen3": Repo(tiny.files, is_gated=True, downloads=4),
    }
    with Hub(repos) as running:
        yield running
