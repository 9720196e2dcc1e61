"""Transformers of embedding models: encoders of this package, decoders of mlx-lm, and mlx-lm's Gemma 3 without a causal
mask.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from protocol.failures import Code
from protocol.kinds import ENCODERS
from protocol.weight_files import weight_files
from worker.embedding.encoder_files import classifier_of, renamed, shape_of
from worker.embedding.encoder_models import EncoderModel, EncoderShape, attention_mask
from worker.errors import LoadFailed
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.class_checks import check_activation, check_floats
from worker.model.rope_check import check_rope

_GEMMA: Final = "gemma3_text"


class EncoderBackbone:
    """Encoder of `encoder_models`, with a classifier if the model is a reranker."""

    def __init__(self, module: EncoderModel, shape: EncoderShape) -> None:
        self.module = module
        self.max_tokens = shape.max_tokens
        # Whether the encoder distinguishes the two texts of a pair by segments.
        self.has_segments = shape.types > 1

    def hidden(self, ids: mx.array, lengths: Sequence[int], types: mx.array | None) -> mx.array:
        return self.module(ids, lengths, types)

    def scores(self, ids: mx.array, lengths: Sequence[int], types: mx.array | None) -> mx.array:
        """Return the classifier's score of each row."""
        return self.module.classifier(self.hidden(ids, lengths, types), lengths)


class DecoderBackbone:
    """Causal model of mlx-lm: no token of a row attends to the padding on its right."""

    max_tokens = 0

    def __init__(self, module: Any) -> None:
        self.module = module

    def hidden(self, ids: mx.array, lengths: Sequence[int], types: mx.array | None) -> mx.array:
        return self.module.model(ids)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits of the next token, given hidden states of single positions."""
        if "lm_head" in self.module:
            return self.module.lm_head(hidden)
        return self.module.model.embed_tokens.as_linear(hidden)


class BidirectionalGemma:
    """Gemma 3 without a causal mask, as in EmbeddingGemma. Its sliding window extends half as far to each side."""

    max_tokens = 0

    def __init__(self, module: Any) -> None:
        self.module = module

    def hidden(self, ids: mx.array, lengths: Sequence[int], types: mx.array | None) -> mx.array:
        core = self.module.model
        hidden = core.embed_tokens(ids)
        hidden = hidden * mx.array(core.args.hidden_size**0.5, hidden.dtype)
        masks = {False: attention_mask(lengths), True: attention_mask(lengths, core.window_size // 2)}
        for layer in core.layers:
            hidden = layer(hidden, masks[layer.self_attn.is_sliding], None)
        return core.norm(hidden)


def load_backbone(
    path: Path, config: dict[str, Any], trust_code: bool, *, is_scoring: bool
) -> EncoderBackbone | DecoderBackbone | BidirectionalGemma:
    """Load the transformer lazily. Raises `LoadFailed`, and mlx-lm's errors."""
    if config.get("model_type") in ENCODERS:
        return _load_encoder(path, config, is_scoring)
    is_bidirectional = config.get("use_bidirectional_attention") is True or config.get("is_causal") is False
    if is_bidirectional and (config["model_type"] != _GEMMA or is_scoring):
        message = f"a {config['model_type']} that sees all of its input at once is not known"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
    if not any("lm_head" in name for file in weight_files(path) for name in _load(file)):
        config = {**config, "tie_word_embeddings": True}
    with checkpoint_view(path, {CONFIG: config}) as view:
        module, _ = load_model(view, lazy=True, get_model_classes=_decoder_classes, trust_remote_code=trust_code)
    check_rope(module, config)
    check_activation(module, config)
    check_floats(path, module)
    core: Any = getattr(module, "model", None)
    if core is None or not callable(core) or not hasattr(core, "embed_tokens"):
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"a {config['model_type']} shows no hidden states")
    return BidirectionalGemma(module) if is_bidirectional else DecoderBackbone(module)


def _load_encoder(path: Path, config: dict[str, Any], is_scoring: bool) -> EncoderBackbone:
    shape = shape_of(config)
    module = EncoderModel(shape, classifier_of(config) if is_scoring else None)
    weights = renamed({name: array for file in weight_files(path) for name, array in _load(file).items()})
    if quantization := config.get("quantization"):
        nn.quantize(
            module,
            quantization["group_size"],
            quantization["bits"],
            class_predicate=lambda name, part: hasattr(part, "to_quantized") and f"{name}.scales" in weights,
        )
    parameters: Any = tree_flatten(module.parameters())
    names = [name for name, _ in parameters]
    if missing := [name for name in names if name not in weights]:
        message = f"{path} lacks {len(missing)} weights of an encoder, such as {missing[0]}"
        raise LoadFailed(Code.MODEL_CORRUPT, message)
    module.load_weights([(name, weights[name]) for name in names])
    module.eval()
    return EncoderBackbone(module, shape)


def _load(file: Path) -> dict[str, mx.array]:
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    return weights


def _decoder_classes(config: dict[str, Any]) -> tuple[type[Any], Any]:
    """Return mlx-lm's class and its arguments class, for checkpoints that may contain only the transformer: their
    weight names lack a prefix, and the output layer is missing."""
    classes: tuple[Any, Any] = _get_classes(config)
    model, arguments = classes

    class Reading(model):
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            if not any(name.startswith("model.") for name in weights):
                weights = {f"model.{name}": array for name, array in weights.items()}
            return super().sanitize(weights) if hasattr(model, "sanitize") else weights

    Reading.__name__ = Reading.__qualname__ = model.__name__
    return Reading, arguments
