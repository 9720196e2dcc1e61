"""Loader of an embedding model: its transformer, the steps after the transformer, and the limits of requests.

Embedding jobs: a job is one request for vectors or scores, from intake to its answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten
from transformers import AutoTokenizer

from protocol.checkpoint import EMBED, ENCODERS, RERANK, TEXT, context_of, has_media, kind_of
from protocol.failures import Code
from protocol.from_worker import EmbeddingInfo
from protocol.spec import WorkerSpec
from worker.embedding.backbones import BidirectionalGemma, DecoderBackbone, EncoderBackbone, load_backbone
from worker.embedding.pooling import PoolingHead, Steps, read_steps
from worker.errors import LoadFailed, foreign_code
from worker.model.loader import (
    cast,
    check_weights,
    explain,
    folded_config,
    load_described,
    nbytes,
    read_config,
    read_json,
    resolve,
    vocab_size_of,
)
from worker.model.memory import has_gpu
from worker.turn_loop import QueuedJob

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """Token ids of an input, and the segment of each token for models that distinguish the texts of a pair."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingJob(QueuedJob):
    """Embedding or scoring request. `results` has a row of numbers for each computed item.

    Vectors are truncated to `dimensions`; 0 means that they are not truncated.
    """

    items: list[EmbeddingInput]
    dimensions: int = 0
    # Indices of items that are not in a pass yet, sorted by length, the longest first.
    left: list[int] = field(default_factory=list)
    results: list[Numbers | None] = field(default_factory=list[Numbers | None])
    computed: int = 0
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.left = sorted(range(len(self.items)), key=lambda at: len(self.items[at].ids), reverse=True)
        self.results = [None] * len(self.items)

    @property
    def is_computed(self) -> bool:
        return self.computed == len(self.items)

    def store(self, at: int, row: Numbers) -> None:
        """Store the result of an item."""
        self.results[at] = row
        self.computed += 1
        self.computed_tokens += len(self.items[at].ids)

    @property
    def tokens(self) -> int:
        return sum(len(item.ids) for item in self.items)

    def data(self) -> bytes:
        """Return all results in the format in which they are sent."""
        rows = [row for row in self.results if row is not None]
        assert len(rows) == len(self.items)
        return np.stack([_cut(row, self.dimensions) for row in rows]).astype("<f4").tobytes()


def _cut(row: Numbers, dimensions: int) -> Numbers:
    if not dimensions or dimensions >= len(row):
        return row
    part = row[:dimensions]
    return (part / np.linalg.norm(part)).astype(np.float32)


# Encoders up to this size are computed in float32 even on a GPU, because float16 would halve their precision.
_MAX_FLOAT32_BYTES: Final = 1 << 30
# Limits above this number of tokens count as no limit, because a tokenizer without a limit has a number such as 1e30.
_UNLIMITED_TOKENS: Final = 1_000_000_000
# Name of the model input by which models distinguish the two texts of a pair.
_SEGMENTS: Final = "token_type_ids"
# A decoder that scores pairs answers with one of these two words.
_YES, _NO = "yes", "no"


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """Loaded embedding or scoring model. `compute` returns a row of numbers for each item."""

    kind: str
    tokenizer: Any
    path: Path
    model_type: str
    vocab_size: int
    max_context: int
    weights_bytes: int
    compute: Callable[[Sequence[EmbeddingInput]], Numbers]
    steps: Steps | None = None
    embedding: EmbeddingInfo | None = None
    # Whether the model distinguishes the texts of a pair by segments in addition to the separator.
    has_segments: bool = False
    # Whether every parameter is float32.
    is_float32: bool = True
    # Whether pairs are formatted with a prompt template instead of by the tokenizer.
    is_judge: bool = False


def kind_of_spec(spec: WorkerSpec) -> str:
    """Return the kind of the model of `spec`. Raises `LoadFailed`."""
    if spec.kind:
        return spec.kind
    path = resolve(spec.path)
    file = path / "config.json"
    return kind_of(read_json(file) if file.exists() else {}, {each.name for each in path.iterdir()}, spec.path)


def load_embedding_model(spec: WorkerSpec, kind: str, progress: Callable[[str, int, int], None]) -> EmbeddingModel:
    """Load the model of `spec`. Calls `progress(stage, done_bytes, total_bytes)`. Raises `LoadFailed`."""
    assert kind != TEXT
    if spec.kv_bits:
        message = "kv_bits is for models that generate text: this one keeps no KV between its passes"
        raise LoadFailed(Code.BAD_CONFIG, message)
    folder = resolve(spec.path)
    config = _folded(folder)
    is_encoder = config["model_type"] in ENCODERS
    is_causal = not is_encoder and config.get("use_bidirectional_attention") is not True
    steps = read_steps(folder, is_causal) if kind == EMBED else None
    path = folder if steps is None else steps.weights
    total = check_weights(path)
    progress("weights", 0, total)
    with foreign_code(lambda error: explain(path, config, error)):
        backbone = load_backbone(path, config, spec.trust_remote_code, is_scoring=kind == RERANK)
        cast(backbone.module, _dtype(spec.dtype, is_encoder, total))
        mx.eval(backbone.module.parameters())
        tokenizer = _load_tokenizer(path, spec)
    weights_bytes = nbytes(backbone.module)
    parameters: Any = tree_flatten(backbone.module.parameters())
    progress("weights", weights_bytes, weights_bytes)
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise LoadFailed(Code.MODEL_MISSING, f"{path} holds no tokenizer that can encode text")
    longest = steps.max_tokens if steps is not None else 0
    vocab_size = vocab_size_of(config, tokenizer)
    compute, width = _compute(backbone, steps, config, tokenizer)
    return EmbeddingModel(
        kind=kind,
        tokenizer=tokenizer,
        path=folder,
        model_type=str(config["model_type"]),
        vocab_size=vocab_size,
        max_context=_context(config, tokenizer, backbone.max_tokens, longest, spec.context),
        weights_bytes=weights_bytes,
        compute=compute,
        steps=steps,
        embedding=None if steps is None else _info(config, steps, width, spec.matryoshka),
        has_segments=getattr(backbone, "has_segments", False) and _SEGMENTS in tokenizer.model_input_names,
        is_float32=all(array.dtype == mx.float32 for _, array in parameters),
        is_judge=kind == RERANK and not is_encoder,
    )


def _load_tokenizer(path: Path, spec: WorkerSpec) -> Any:
    def load(folder: Path, settings: Mapping[str, Any]) -> Any:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=spec.trust_remote_code, **settings)

    return load_described(path, load)


def _folded(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    if has_media(config):
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "embeddings and scores of a model of images and text are not served")
    return folded_config(config)


def _dtype(configured: str, is_encoder: bool, total: int) -> str:
    return "float32" if configured == "auto" and is_encoder and has_gpu() and total < _MAX_FLOAT32_BYTES else configured


def _compute(
    backbone: EncoderBackbone | DecoderBackbone | BidirectionalGemma,
    steps: Steps | None,
    config: Mapping[str, Any],
    tokenizer: Any,
) -> tuple[Callable[[Sequence[EmbeddingInput]], Numbers], int]:
    """Return the function that computes a row of numbers for each item, and the length of a row."""
    if steps is not None:
        head = PoolingHead(steps)
        width = head.width(int(config.get("hidden_size") or config.get("n_embd") or 0))
        return lambda items: _numbers(head(backbone.hidden(*_batch(items)), _lengths(items))), width
    if isinstance(backbone, EncoderBackbone):
        is_sigmoid = _is_sigmoid(config)

        def score(items: Sequence[EmbeddingInput]) -> Numbers:
            scores = backbone.scores(*_batch(items)).astype(mx.float32)
            return _numbers((mx.sigmoid(scores) if is_sigmoid else scores)[:, None])

        return score, 1
    assert isinstance(backbone, DecoderBackbone)
    yes, no = _word(tokenizer, _YES), _word(tokenizer, _NO)

    def judge(items: Sequence[EmbeddingInput]) -> Numbers:
        hidden = backbone.hidden(*_batch(items))
        last = hidden[mx.arange(len(items)), mx.array(_lengths(items)) - 1]
        logits = backbone.logits(last).astype(mx.float32)
        return _numbers(mx.sigmoid(logits[:, yes] - logits[:, no])[:, None])

    return judge, 1


def _batch(items: Sequence[EmbeddingInput]) -> tuple[mx.array, list[int], mx.array | None]:
    lengths = _lengths(items)
    longest = max(lengths)
    ids = mx.array([[*item.ids, *(0,) * (longest - len(item.ids))] for item in items])
    if not items[0].types:
        return ids, lengths, None
    return ids, lengths, mx.array([[*item.types, *(0,) * (longest - len(item.types))] for item in items])


def _lengths(items: Sequence[EmbeddingInput]) -> list[int]:
    return [len(item.ids) for item in items]


def _numbers(rows: mx.array) -> Numbers:
    return np.array(rows, dtype=np.float32)


def _word(tokenizer: Any, word: str) -> int:
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        message = f"a decoder that scores pairs says {_YES!r} or {_NO!r}; this tokenizer has no token for {word!r}"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
    return int(ids[0])


def _is_sigmoid(config: Mapping[str, Any]) -> bool:
    """Return whether scores pass through a sigmoid: the default, unless the files of sentence-transformers name another
    function.
    """
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else config.get("sbert_ce_default_activation_function")
    kind = str(named or "Sigmoid").rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"the activation {kind!r} of a score is not known")
    return kind == "Sigmoid"


def _context(config: dict[str, Any], tokenizer: Any, own: int, longest: int, wanted: int) -> int:
    """Return the context length: the lowest limit in config.json, the encoder's positions, the other files and the
    settings.
    """
    named = context_of(config)
    limit = getattr(tokenizer, "model_max_length", None)
    limits = [
        own or (int(named[1]) if named is not None else 0),
        longest,
        wanted,
        limit if isinstance(limit, int) and limit < _UNLIMITED_TOKENS else 0,
    ]
    stated = [each for each in limits if each > 0]
    if not stated:
        raise LoadFailed(Code.MODEL_CORRUPT, "no file of the model says how long its input may be; set context")
    return min(stated)


def _info(config: Mapping[str, Any], steps: Steps, width: int, is_allowed: bool) -> EmbeddingInfo:
    is_declared = bool(config.get("is_matryoshka") or config.get("matryoshka_dimensions") or steps.dimensions)
    return EmbeddingInfo(width, is_allowed or is_declared, tuple(steps.prompts))
