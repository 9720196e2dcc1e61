"""Short list of models, with their sizes, that mlxd recommends without a network.

Sizes in bytes are those that the repositories publish; shapes are those of their config.json.
"""

from typing import Any, Final

from msgspec import Struct

from gateway.model_files.metadata import ModelMetadata, TensorEntry, estimate, measure


class HubEntry(Struct, frozen=True):
    """One repository. `config` has the fields from which the size of the KV is estimated."""

    repository: str
    purpose: str
    disk_bytes: int
    config: dict[str, Any]

    def inspect(self, available_bytes: int) -> ModelMetadata:
        """Estimate the model's memory and whether it fits, as `mlxctl info` does from files."""
        # A ninth of a model with four bits in groups of 64 is scales and biases. They are the floats that a dtype
        # changes.
        floats = self.disk_bytes // 9
        packed = self.disk_bytes - floats
        tensors = (
            TensorEntry("U32", (packed // 4,), (0, packed)),
            TensorEntry("BF16", (floats // 2,), (packed, self.disk_bytes)),
        )
        return estimate(self.repository, self.config, measure(tensors, "auto"), 0, available_bytes)


def _config(model_type: str, layers: int, heads: int, kv_heads: int, width: int, context: int) -> dict[str, Any]:
    return {
        "model_type": model_type, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width, "max_position_embeddings": context,
    }  # fmt: skip


def _hybrid(model_type: str) -> dict[str, Any]:
    """Return the configuration of a model with recurrent and attention layers, for which no KV size is computed."""
    return {"model_type": model_type, "max_position_embeddings": 262144}


def _gpt_oss(layers: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return _config("gpt_oss", layers, 64, 8, 64, 131072) | {"layer_types": kinds, "sliding_window": 128}


SHORTLIST: Final = (
    HubEntry("mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit", "the most capable here", 141_733_920_768,
          _config("qwen3_moe", 94, 64, 4, 128, 262144)),
    HubEntry("mlx-community/gpt-oss-120b-MXFP4-Q8", "reasoning and tools", 70_652_212_224, _gpt_oss(36)),
    HubEntry("mlx-community/Qwen3.5-122B-A10B-4bit", "general", 69_593_314_272, _hybrid("qwen3_5_moe")),
    HubEntry("mlx-community/Qwen3-Coder-Next-4bit", "coding agents", 45_644_286_500, _hybrid("qwen3_next")),
    HubEntry("mlx-community/Qwen3.6-35B-A3B-4bit", "general, fast", 20_401_929_952, _hybrid("qwen3_5_moe")),
    HubEntry("mlx-community/Qwen3-30B-A3B-4bit", "general, fast", 17_612_931_072,
          _config("qwen3_moe", 48, 32, 4, 128, 40960)),
    HubEntry("mlx-community/Qwen3.6-27B-4bit", "general", 16_054_262_240, _hybrid("qwen3_5")),
    HubEntry("mlx-community/gpt-oss-20b-MXFP4-Q8", "reasoning and tools", 12_025_908_224, _gpt_oss(24)),
    HubEntry("mlx-community/Qwen3.5-9B-4bit", "general", 5_950_062_560, _hybrid("qwen3_5")),
    HubEntry("mlx-community/Qwen3-4B-4bit", "small", 2_278_972_183, _config("qwen3", 36, 32, 8, 128, 40960)),
    HubEntry("mlx-community/Qwen3-0.6B-4bit", "very small, to try things out", 342_884_352,
          _config("qwen3", 28, 16, 8, 128, 40960)),
)  # fmt: skip
