"""Tiny random models of embeddings and scores, in the layout of a Hugging Face repository with torch's names.

The numbers come from numpy, so that any machine makes the same files: `reading_reference.py` reads them with torch.
"""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from tokenizers.processors import TemplateProcessing

from tests.support.models import tiny_tokenizer

WIDTH: Final = 32
INNER: Final = 48
HEADS: Final = 4
LAYERS: Final = 3
TEXTS: Final = (
    "kato",
    "lu por vi de an",
    "sen lumi kara por delu toran visen kato mira lu an de por vi",
    "The quick brown fox jumps over the lazy dog, and then sleeps for an hour.",
    "né 🙂",
    "kato " * 24,
)
PAIRS: Final = (("kato", "lu por vi de an"), ("kato", "mira sen"), ("lu mira", "kato " * 20), ("a", "b"))
_BASE: Final[dict[str, Any]] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 160,
    "torch_dtype": "float32",
}
_BERT: Final = {**_BASE, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "pad_token_id": 0}
_ROBERTA: Final = {**_BASE, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "hidden_act": "gelu", "pad_token_id": 1}
_MODERN: Final = {
    **_BASE,
    "norm_eps": 1e-5,
    "global_attn_every_n_layers": 3,
    "local_attention": 8,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "pad_token_id": 0,
    "cls_token_id": 0,
    "sep_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_NOMIC: Final = {
    **_BASE,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
_DECODER: Final = {
    **_BASE,
    "max_position_embeddings": 512,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_GEMMA: Final = {
    **_DECODER,
    "sliding_window": 16,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": True,
}
# Each family of embedders: its class in transformers, its configuration, and how hidden states become a vector.
EMBEDDERS: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "bert": ("BertModel", _BERT, "cls_token"),
    "xlm-roberta": ("XLMRobertaModel", _ROBERTA, "mean_tokens"),
    "modernbert": ("ModernBertModel", _MODERN, "mean_tokens"),
    "nomic_bert": ("NomicBertModel", _NOMIC, "mean_tokens"),
    "gemma3_text": ("Gemma3TextModel", _GEMMA, "mean_tokens"),
    "qwen3": ("Qwen3ForCausalLM", _DECODER, "lasttoken"),
}
RERANKERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bert": ("BertForSequenceClassification", {**_BERT, "num_labels": 1}),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", {**_ROBERTA, "num_labels": 1}),
    "modernbert": ("ModernBertForSequenceClassification", {**_MODERN, "num_labels": 1, "classifier_pooling": "mean"}),
    "qwen3": ("Qwen3ForCausalLM", _DECODER),
}
_LIBRARY: Final = "sentence_transformers.models"
PROMPTS: Final = {"query": "task: search | query: ", "document": "title: none | text: "}
_INFORMAL: Final = {"nomic_bert": "", "gemma3_text": "", "qwen3": "model."}


def build_embedder(family: str, folder: Path, **changes: Any) -> Path:
    """A model that makes embeddings; `changes` are of its config.json."""
    architecture, config, way = EMBEDDERS[family]
    _write_model(family, folder, architecture, {**config, **changes})
    dense = 2 if family == "gemma3_text" else 0
    steps = ["Transformer", "Pooling", *["Dense"] * dense, "Normalize"]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"{_LIBRARY}.{kind}",
        }
        for at, kind in enumerate(steps)
    ]
    _write(folder / "modules.json", modules)
    _write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": WIDTH,
            **{f"pooling_mode_{each}": each == way for each in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")},
        },
    )
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 120, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    rng = np.random.default_rng(5)
    for at, (width, out) in enumerate([(WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)][:dense], start=2):
        place = folder / f"{at}_Dense"
        activation = "torch.nn.modules.linear.Identity" if at == 2 else "torch.nn.modules.activation.Tanh"
        _write(
            place / "config.json",
            {"in_features": width, "out_features": out, "bias": at == 3, "activation_function": activation},
        )
        weights = {"linear.weight": _random(rng, out, width)} | ({"linear.bias": _random(rng, out)} if at == 3 else {})
        mx.save_safetensors(str(place / "model.safetensors"), weights)
    return folder


def build_reranker(family: str, folder: Path, **changes: Any) -> Path:
    """A model that scores pairs."""
    architecture, config = RERANKERS[family]
    _write_model(family, folder, architecture, {**config, **changes})
    return folder


def _write_model(family: str, folder: Path, architecture: str, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(["[CLS]", "[SEP]", "yes", "no"])
    tokenizer.chat_template = None
    first, last = (tokenizer.convert_tokens_to_ids(each) for each in ("[CLS]", "[SEP]"))
    if family == "qwen3":
        end = "<|endoftext|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.convert_tokens_to_ids(end))]
        )
    else:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", first), ("[SEP]", last)],
        )
    tokenizer.save_pretrained(folder)
    segments = ["token_type_ids"] if config.get("type_vocab_size", 0) > 1 else []
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    _write(
        folder / "tokenizer_config.json",
        settings | {"model_input_names": ["input_ids", *segments, "attention_mask"]},
    )
    config = {"architectures": [architecture], "model_type": family, "vocab_size": len(tokenizer), **config}
    labels = config.pop("num_labels", None)
    if labels is not None:
        config["id2label"] = {str(at): f"LABEL_{at}" for at in range(labels)}
    _write(folder / "config.json", config)
    rng = np.random.default_rng(7)
    shapes = _shapes(family, config, labels)
    weights = {name: _weight(rng, name, shape) for name, shape in sorted(shapes.items())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})


def _weight(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> mx.array:
    is_scale = len(shape) == 1 and name.endswith("weight")
    return _random(rng, *shape) * 0.3 + 1 if is_scale else _random(rng, *shape)


def _random(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array((rng.standard_normal(shape) * (0.25 if len(shape) > 1 else 0.1)).astype(np.float32))


def _shapes(family: str, config: dict[str, Any], labels: int | None) -> dict[str, tuple[int, ...]]:
    make = {"bert": _bert, "xlm-roberta": _bert, "modernbert": _modernbert, "nomic_bert": _nomic}.get(family)
    if make is None:
        return _decoder(family, config)
    shapes = make(config)
    if labels is None:
        return shapes
    prefix = {"bert": "bert.", "xlm-roberta": "roberta.", "modernbert": "model."}[family]
    named = {prefix + name: shape for name, shape in shapes.items() if not name.startswith("pooler.")}
    square, out = (WIDTH, WIDTH), {"weight": (labels, WIDTH), "bias": (labels,)}
    match family:
        case "bert":
            named |= {"bert.pooler.dense.weight": square, "bert.pooler.dense.bias": (WIDTH,)}
            named |= {f"classifier.{part}": shape for part, shape in out.items()}
        case "xlm-roberta":
            named |= {"classifier.dense.weight": square, "classifier.dense.bias": (WIDTH,)}
            named |= {f"classifier.out_proj.{part}": shape for part, shape in out.items()}
        case _:
            named |= {"head.dense.weight": square, "head.norm.weight": (WIDTH,)}
            named |= {f"classifier.{part}": shape for part, shape in out.items()}
    return named


def _linear(name: str, width: int, out: int, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, width)} | ({f"{name}.bias": (out,)} if bias else {})


def _norm(name: str, *, bias: bool = True) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,)} | ({f"{name}.bias": (WIDTH,)} if bias else {})


def _bert(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], WIDTH),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], WIDTH),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], WIDTH),
        **_norm("embeddings.LayerNorm"),
        **_linear("pooler.dense", WIDTH, WIDTH),
    }
    for at in range(LAYERS):
        layer = f"encoder.layer.{at}"
        for part in ("query", "key", "value"):
            shapes |= _linear(f"{layer}.attention.self.{part}", WIDTH, WIDTH)
        shapes |= _linear(f"{layer}.attention.output.dense", WIDTH, WIDTH) | _norm(
            f"{layer}.attention.output.LayerNorm"
        )
        shapes |= _linear(f"{layer}.intermediate.dense", WIDTH, INNER) | _linear(f"{layer}.output.dense", INNER, WIDTH)
        shapes |= _norm(f"{layer}.output.LayerNorm")
    return shapes


def _modernbert(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.tok_embeddings.weight": (config["vocab_size"], WIDTH),
        **_norm("embeddings.norm", bias=False),
        **_norm("final_norm", bias=False),
    }
    for at in range(LAYERS):
        layer = f"layers.{at}"
        shapes |= _norm(f"{layer}.attn_norm", bias=False) if at else {}
        shapes |= _linear(f"{layer}.attn.Wqkv", WIDTH, 3 * WIDTH, bias=False)
        shapes |= _linear(f"{layer}.attn.Wo", WIDTH, WIDTH, bias=False) | _norm(f"{layer}.mlp_norm", bias=False)
        shapes |= _linear(f"{layer}.mlp.Wi", WIDTH, 2 * INNER, bias=False)
        shapes |= _linear(f"{layer}.mlp.Wo", INNER, WIDTH, bias=False)
    return shapes


def _nomic(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """As the first version names them, which transformers renames at a load."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], WIDTH),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], WIDTH),
        **_norm("emb_ln"),
    }
    for at in range(LAYERS):
        layer = f"encoder.layers.{at}"
        shapes |= _linear(f"{layer}.attn.Wqkv", WIDTH, 3 * WIDTH, bias=False)
        shapes |= _linear(f"{layer}.attn.out_proj", WIDTH, WIDTH, bias=False)
        shapes |= _linear(f"{layer}.mlp.fc11", WIDTH, INNER, bias=False) | _norm(f"{layer}.norm1")
        shapes |= _linear(f"{layer}.mlp.fc12", WIDTH, INNER, bias=False) | _norm(f"{layer}.norm2")
        shapes |= _linear(f"{layer}.mlp.fc2", INNER, WIDTH, bias=False)
    return shapes


def _decoder(family: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    prefix, head = _INFORMAL[family], config["head_dim"]
    width, small = head * HEADS, head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (config["vocab_size"], WIDTH)}
    shapes |= _norm(f"{prefix}norm", bias=False)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3_text":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for at in range(LAYERS):
        layer = f"{prefix}layers.{at}"
        for name, out in (("q_proj", width), ("k_proj", small), ("v_proj", small)):
            shapes |= _linear(f"{layer}.self_attn.{name}", WIDTH, out, bias=False)
        shapes |= _linear(f"{layer}.self_attn.o_proj", width, WIDTH, bias=False)
        shapes |= {f"{layer}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        for name in ("gate_proj", "up_proj"):
            shapes |= _linear(f"{layer}.mlp.{name}", WIDTH, INNER, bias=False)
        shapes |= _linear(f"{layer}.mlp.down_proj", INNER, WIDTH, bias=False)
        for name in norms:
            shapes |= _norm(f"{layer}.{name}", bias=False)
    return shapes


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
