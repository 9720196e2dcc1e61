"""Bound of a forward pass of a model with experts, which gather a row for each token and chosen expert."""

from collections.abc import Mapping
from typing import Any, Final

from worker.model.experts.expert_cache import PROJECTIONS

# Beyond this number of rows, MLX up to 0.32.2 computed wrong results on an M5 (mlx#3856, fixed by mlx#3922).
MAX_GATHERED_ROWS: Final = 32_768
# Keys of config.json that hold the number of experts per token.
_CHOSEN: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
)


def experts_per_token(model: Any, config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer that a token uses; 0 for a model without experts."""
    counts = [int(module.weight.shape[0]) for _, module in model.named_modules() if isinstance(module, PROJECTIONS)]
    return chosen_of(config, min(counts)) if counts else 0


def chosen_of(config: Mapping[str, Any], experts: int) -> int:
    """Return the number of experts per token; if the configuration has none, a quarter of a layer's experts."""
    parts = [config, config.get("text_config"), config.get("ffn_config")]
    values = [part.get(key) for part in parts if isinstance(part, Mapping) for key in _CHOSEN]
    each = [count for value in values for count in (value if isinstance(value, list) else [value])]
    return max((count for count in each if isinstance(count, int) and count > 0), default=max(1, experts // 4))


def pass_tokens(experts: int) -> int:
    """Return the maximum number of tokens of a forward pass, by the experts per token; 0 means no limit."""
    return max(1, MAX_GATHERED_ROWS // experts) if experts else 0
