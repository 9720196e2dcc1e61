"""Transformers of embedding models: encoders of this package, decoders of mlx-lm, and mlx-lm's Gemma 3 without a causal
mask.

Encoders: BERT, RoBERTa and XLM-R, ModernBERT and nomic-bert as one stack of layers with the norm before or after.

mlx-vlm's encoders are not used, because they approximate GELU for ModernBERT and do not include nomic-bert: equal
results need the exact activation and the masks of `attention_mask`.

Checkpoints of encoders: their shape from config.json, and the names of their weights.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from protocol.checkpoint import ENCODERS, is_scaled, kind_of_scaling, rope_tables
from protocol.failures import Code
from protocol.model_files import weight_files
from worker.embedding.pooling import pooled
from worker.errors import LoadFailed
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.class_checks import check_activation, check_floats, check_rope

ACTIVATIONS: Final[dict[str, Callable[[mx.array], mx.array]]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swiglu": nn.silu,
    "tanh": mx.tanh,
}


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes and variants of an encoder. `first_position` is the index of the first token's position embedding, if
    positions are learned.

    `windows` and `thetas` have an entry for each layer; a window of 0 means full attention, a theta of 0 no rotation.
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    first_position: int = 0
    types: int = 0
    epsilon: float = 1e-12
    activation: str = "gelu"
    # Whether layers normalize their input instead of their output; if so, one more norm follows the last layer.
    is_prenorm: bool = False
    is_gated: bool = False
    has_attention_bias: bool = True
    has_inner_bias: bool = True
    has_norm_bias: bool = True
    has_learned_positions: bool = True
    windows: tuple[int, ...] = ()
    thetas: tuple[float, ...] = ()

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def max_tokens(self) -> int:
        return self.positions - self.first_position


class _Embeddings(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self._first = shape.first_position
        self.word = nn.Embedding(shape.vocabulary, shape.width)
        if shape.has_learned_positions:
            self.position = nn.Embedding(shape.positions, shape.width)
        if shape.types:
            self.type = nn.Embedding(shape.types, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)

    def __call__(self, ids: mx.array, types: mx.array | None) -> mx.array:
        hidden = self.word(ids)
        if "type" in self:
            hidden = hidden + self.type(mx.zeros_like(ids) if types is None else types)
        if "position" in self:
            hidden = hidden + self.position(mx.arange(self._first, self._first + ids.shape[1]))
        return self.norm(hidden)


class _Attention(nn.Module):
    def __init__(self, shape: EncoderShape, theta: float) -> None:
        super().__init__()
        self._heads, self._width, self._theta = shape.heads, shape.head_width, theta
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.has_attention_bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.has_attention_bias)

    def __call__(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        rows, length, width = hidden.shape
        heads = self.qkv(hidden).reshape(rows, length, 3, self._heads, self._width).transpose(2, 0, 3, 1, 4)
        queries, keys, values = heads[0], heads[1], heads[2]
        if self._theta:
            queries, keys = self._rotated(queries), self._rotated(keys)
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._width**-0.5, mask=mask)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(rows, length, width))

    def _rotated(self, heads: mx.array) -> mx.array:
        return mx.fast.rope(heads, self._width, traditional=False, base=self._theta, scale=1.0, offset=0)


class _Inner(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self._activate = ACTIVATIONS[shape.activation]
        self.up = nn.Linear(shape.width, shape.inner, bias=shape.has_inner_bias)
        if shape.is_gated:
            self.gate = nn.Linear(shape.width, shape.inner, bias=shape.has_inner_bias)
        self.down = nn.Linear(shape.inner, shape.width, bias=shape.has_inner_bias)

    def __call__(self, hidden: mx.array) -> mx.array:
        if "gate" in self:
            return self.down(self._activate(self.gate(hidden)) * self.up(hidden))
        return self.down(self._activate(self.up(hidden)))


class _Layer(nn.Module):
    def __init__(self, shape: EncoderShape, at: int) -> None:
        super().__init__()
        self._is_prenorm = shape.is_prenorm
        self.attention = _Attention(shape, shape.thetas[at] if shape.thetas else 0.0)
        self.inner = _Inner(shape)
        # ModernBERT's first layer directly follows the norm of the embeddings, so it has no norm of its own.
        if not (shape.is_prenorm and at == 0):
            self.attention_norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)
        self.inner_norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)

    def __call__(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        if not self._is_prenorm:
            hidden = self.attention_norm(hidden + self.attention(hidden, mask))
            return self.inner_norm(hidden + self.inner(hidden))
        normed = self.attention_norm(hidden) if "attention_norm" in self else hidden
        hidden = hidden + self.attention(normed, mask)
        return hidden + self.inner(self.inner_norm(hidden))


class _Classifier(nn.Module):
    """Two layers that score hidden states: those of the first token, or the mean of all tokens."""

    def __init__(self, shape: EncoderShape, activation: str, norm_bias: bool | None, is_mean: bool, bias: bool) -> None:
        super().__init__()
        self._activate, self._is_mean = ACTIVATIONS[activation], is_mean
        self.dense = nn.Linear(shape.width, shape.width, bias=bias)
        if norm_bias is not None:
            self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=norm_bias)
        self.score = nn.Linear(shape.width, 1)

    def __call__(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        vectors = pooled("mean" if self._is_mean else "cls", hidden, mx.array(list(lengths)))
        vectors = self._activate(self.dense(vectors))
        return self.score(self.norm(vectors) if "norm" in self else vectors)[:, 0]


class EncoderModel(nn.Module):
    """Encoder from token ids to hidden states. A reranker's `classifier` scores them."""

    def __init__(self, shape: EncoderShape, classifier: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._windows = shape.windows or (0,) * shape.layers
        self.embeddings = _Embeddings(shape)
        self.layers = [_Layer(shape, at) for at in range(shape.layers)]
        if shape.is_prenorm:
            self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)
        if classifier is not None:
            self.classifier = _Classifier(shape, **classifier)

    def __call__(self, ids: mx.array, lengths: Sequence[int], types: mx.array | None = None) -> mx.array:
        """Return the hidden states `[rows, longest, width]` of rows that are padded on the right."""
        masks = {window: attention_mask(lengths, window) for window in set(self._windows)}
        hidden = self.embeddings(ids, types)
        for layer, window in zip(self.layers, self._windows, strict=True):
            hidden = layer(hidden, masks[window])
        return self.norm(hidden) if "norm" in self else hidden


def attention_mask(lengths: Sequence[int], window: int = 0) -> mx.array | None:
    """Return a mask that is true where a token attends to another: in its row, and within `window` (0 means any
    distance).

    Return None if every token attends to all. A token always attends to itself: an empty mask row would give NaN, and
    padding with NaN would spoil the values of other tokens even at weight 0.
    """
    longest = max(lengths)
    is_padded = min(lengths) < longest
    has_window = 0 < window < longest - 1
    if not is_padded and not has_window:
        return None
    at = mx.arange(longest)
    is_token = (at[None] < mx.array(list(lengths))[:, None])[:, None, None, :]
    if not has_window:
        return is_token
    distance = mx.abs(at[:, None] - at[None])
    return (is_token & (distance <= window)[None, None]) | (distance == 0)[None, None]


_ROBERTA: Final = ("roberta", "xlm-roberta", "camembert")
_THETAS: Final = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
_PREFIX: Final = re.compile(r"^(bert|roberta|nomic_bert|model)\.")
_ENDS: Final = {".gamma": ".weight", ".beta": ".bias"}
# Patterns of weight names in the checkpoints of all families, with the corresponding part of `EncoderModel`. No name
# matches two patterns.
_NAMES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^embeddings\.(word_embeddings|tok_embeddings)\.", "embeddings.word."),
        (r"^embeddings\.position_embeddings\.", "embeddings.position."),
        (r"^embeddings\.token_type_embeddings\.", "embeddings.type."),
        (r"^(embeddings\.LayerNorm|emb_ln)\.", "embeddings.norm."),
        (r"^encoder\.layers?\.", "layers."),
        (r"^final_norm\.", "norm."),
        (r"\.attention\.self\.(query|key|value)\.", r".attention.\1."),
        (r"\.self_attn\.q_proj\.", ".attention.query."),
        (r"\.self_attn\.k_proj\.", ".attention.key."),
        (r"\.self_attn\.v_proj\.", ".attention.value."),
        (r"\.attn\.Wqkv\.", ".attention.qkv."),
        (r"\.(attention\.output\.dense|attn\.out_proj|attn\.Wo|self_attn\.o_proj)\.", ".attention.out."),
        (r"\.(attention\.output\.LayerNorm|attn_norm|norm1|post_attention_layernorm)\.", ".attention_norm."),
        (r"\.(intermediate\.dense|mlp\.fc11|mlp\.up_proj)\.", ".inner.up."),
        (r"\.(mlp\.fc12|mlp\.gate_proj)\.", ".inner.gate."),
        (r"\.(output\.dense|mlp\.fc2|mlp\.down_proj|mlp\.Wo)\.", ".inner.down."),
        (r"\.(output\.LayerNorm|mlp_norm|norm2|post_mlp_layernorm)\.", ".inner_norm."),
        (r"^(pooler|head)\.dense\.", "classifier.dense."),
        (r"^head\.norm\.", "classifier.norm."),
        (r"^classifier\.out_proj\.", "classifier.score."),
        (r"^classifier\.(weight|bias|scales|biases)$", r"classifier.score.\1"),
    )
)
_PARTS: Final = ("query", "key", "value")
_FUSED: Final = ".mlp.Wi."


def shape_of(config: Mapping[str, Any]) -> EncoderShape:
    """Read the shape of an encoder. Raises `LoadFailed` for unsupported variants of the family."""
    kind = config.get("model_type")
    try:
        shape = (
            _modernbert(config) if kind == "modernbert" else _nomic(config) if kind == "nomic_bert" else _bert(config)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"config.json of this {kind} lacks or misstates {error}") from error
    if scaled := [kind_of_scaling(table) for table in rope_tables(config).values() if is_scaled(table)]:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"an encoder with scaled positions ({scaled[0]}) is not known")
    if shape.activation not in ACTIVATIONS:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"the activation {shape.activation!r} is not known")
    return shape


def classifier_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a reranker's last layers. Raises `LoadFailed` if the classifier has several scores."""
    labels = config.get("num_labels") or len(config.get("id2label") or {}) or 1
    if labels != 1:
        message = f"it tells {labels} classes apart; a reranker gives one score (num_labels 1)"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
    if config.get("model_type") == "modernbert":
        return {
            "activation": str(config.get("classifier_activation", "gelu")),
            "norm_bias": bool(config.get("norm_bias", False)),
            "is_mean": config.get("classifier_pooling", "cls") == "mean",
            "bias": bool(config.get("classifier_bias", False)),
        }
    if config.get("model_type") == "nomic_bert":
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "rerankers of the architecture nomic_bert are not known")
    return {"activation": "tanh", "norm_bias": None, "is_mean": False, "bias": True}


def renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights under the names of `EncoderModel`, with projections fused and split as `EncoderModel` needs
    them.
    """
    named = {_name(name): array for name, array in weights.items()}
    for name in [name for name in named if ".attention.query." in name]:
        parts = [named.pop(name.replace(".query.", f".{part}.")) for part in _PARTS]
        named[name.replace(".query.", ".qkv.")] = mx.concatenate(parts)
    for name in [name for name in named if _FUSED in name]:
        # The activation applies to the first half, the gate.
        gate, up = mx.split(named.pop(name), 2)
        named[name.replace(_FUSED, ".inner.gate.")], named[name.replace(_FUSED, ".inner.up.")] = gate, up
    return named


def _name(name: str) -> str:
    name = _PREFIX.sub("", name)
    for old, new in _ENDS.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    for pattern, part in _NAMES:
        name = pattern.sub(part, name)
    return name


def _bert(config: Mapping[str, Any]) -> EncoderShape:
    if config.get("position_embedding_type", "absolute") != "absolute" or config.get("is_decoder"):
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "BERT is served with absolute positions, as an encoder")
    is_roberta = config["model_type"] in _ROBERTA
    return EncoderShape(
        layers=int(config["num_hidden_layers"]),
        width=int(config["hidden_size"]),
        heads=int(config["num_attention_heads"]),
        inner=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        positions=int(config["max_position_embeddings"]),
        # RoBERTa's positions begin after its padding id.
        first_position=int(config.get("pad_token_id", 1)) + 1 if is_roberta else 0,
        types=int(config.get("type_vocab_size", 0)),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        activation=str(config.get("hidden_act", "gelu")),
    )


def _nomic(config: Mapping[str, Any]) -> EncoderShape:
    """Read nomic-bert's shape. The keys are GPT-2's, as in the model's first version, or those of transformers."""
    if config.get("num_experts") or config.get("prenorm") or config.get("rotary_emb_interleaved"):
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "nomic-bert is served without experts, norms first or other rotations")
    layers = int(_either(config, "num_hidden_layers", "n_layer"))
    theta = float(config.get("rotary_emb_base") or 1000.0)
    trained = config.get("max_trained_positions")
    positions = int(_either(config, "max_position_embeddings", "n_positions"))
    has_bias = bool(config.get("qkv_proj_bias", False))
    return EncoderShape(
        layers=layers,
        width=int(_either(config, "hidden_size", "n_embd")),
        heads=int(_either(config, "num_attention_heads", "n_head")),
        inner=int(_either(config, "intermediate_size", "n_inner")),
        vocabulary=int(config["vocab_size"]),
        # Inputs longer than those in training would need a scaled rotation, so the training length is the limit.
        positions=min(positions, int(trained)) if trained else positions,
        types=int(config.get("type_vocab_size", 0)),
        epsilon=float(config.get("layer_norm_eps") or config.get("layer_norm_epsilon") or 1e-12),
        activation=str(config.get("hidden_act") or config.get("activation_function") or "silu"),
        is_gated=True,
        has_attention_bias=has_bias,
        has_inner_bias=bool(config.get("mlp_fc1_bias", False)),
        has_learned_positions=False,
        thetas=(theta,) * layers,
    )


def _modernbert(config: Mapping[str, Any]) -> EncoderShape:
    layers = int(config["num_hidden_layers"])
    every = int(config.get("global_attn_every_n_layers") or 3)
    full, sliding = _THETAS
    kinds = config.get("layer_types") or [sliding if at % every else full for at in range(layers)]
    thetas = {
        full: float(config.get("global_rope_theta") or _THETAS[full]),
        sliding: float(config.get("local_rope_theta") or _THETAS[sliding]),
    }
    windows = {full: 0, sliding: int(config.get("local_attention", 128)) // 2}
    return EncoderShape(
        layers=layers,
        width=int(config["hidden_size"]),
        heads=int(config["num_attention_heads"]),
        inner=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        positions=int(config.get("max_position_embeddings") or 8192),
        epsilon=float(config.get("norm_eps", 1e-5)),
        activation=str(config.get("hidden_activation", "gelu")),
        is_prenorm=True,
        is_gated=True,
        has_attention_bias=bool(config.get("attention_bias", False)),
        has_inner_bias=bool(config.get("mlp_bias", False)),
        has_norm_bias=bool(config.get("norm_bias", False)),
        has_learned_positions=False,
        windows=tuple(windows[kind] for kind in kinds),
        thetas=tuple(thetas[kind] for kind in kinds),
    )


def _either(config: Mapping[str, Any], *names: str) -> Any:
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None:
        raise KeyError(names[0])
    return value


_GEMMA: Final = "gemma3_text"


class EncoderBackbone:
    """Encoder, with a classifier if the model is a reranker."""

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
