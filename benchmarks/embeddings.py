"""Texts embedded a CPU second by mlxd's worker and by sentence-transformers, on the same random weights, by turns.

`python -m benchmarks.embeddings --torch .cache/torch/bin/python` wants an interpreter with torch and
sentence-transformers, which are no dependencies of mlxd. The model has the geometry of all-MiniLM-L6.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.blas import CACHE, environment, has_openblas
from benchmarks.models import new_tokenizer
from benchmarks.words import sentences

LAYERS, WIDTH, INNER, HEADS, VOCABULARY, POSITIONS = 6, 384, 1536, 12, 4096, 512
ROUNDS: Final = 2
# Number of lines of 12 words in a text; the lengths are those of passages for retrieval.
LINES: Final = (1, 6)
# Program of the other interpreter: it reads texts from standard input, and writes seconds and the file of vectors.
_THEIRS: Final = """
import json, sys, time
import numpy as np
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
texts = json.loads(sys.stdin.read())
model.encode(texts[:8])
begin = time.process_time()
vectors = model.encode(texts, batch_size=32)
seconds = time.process_time() - begin
np.save(sys.argv[2], vectors)
print(json.dumps(seconds))
"""


def build(folder: Path) -> Path:
    """Write a BERT of random weights with its tokenizer, in the layout of a Hugging Face repository."""
    import mlx.core as mx

    tokenizer = new_tokenizer(VOCABULARY - 64)
    tokenizer.chat_template = None
    tokenizer.model_max_length = POSITIONS
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "num_attention_heads": HEADS, "type_vocab_size": 2,
        "max_position_embeddings": POSITIONS, "hidden_act": "gelu", "layer_norm_eps": 1e-12, **sizes,
    }  # fmt: skip
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")))
    ]
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
    files: dict[str, Any] = {"config.json": config, "modules.json": modules, "1_Pooling/config.json": pooling}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    rng = np.random.default_rng(0)
    weights = {name: mx.array(_values(rng, name, shape)) for name, shape in _shapes().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return folder


def _values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Any:
    if name.endswith("LayerNorm.weight"):
        return np.ones(shape, np.float32)
    return (rng.standard_normal(shape) * 0.04).astype(np.float32)


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCABULARY, WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for at in range(LAYERS):
        layer = f"encoder.layer.{at}"
        linear = [(f"attention.self.{part}", WIDTH, WIDTH) for part in ("query", "key", "value")]
        linear += [("attention.output.dense", WIDTH, WIDTH), ("intermediate.dense", INNER, WIDTH)]
        for name, out, width in (*linear, ("output.dense", WIDTH, INNER)):
            shapes |= {f"{layer}.{name}.weight": (out, width), f"{layer}.{name}.bias": (out,)}
        for name in ("attention.output", "output"):
            shapes |= {f"{layer}.{name}.LayerNorm.{part}": (WIDTH,) for part in ("weight", "bias")}
    return shapes


def texts_of(count: int) -> tuple[str, ...]:
    rng = random.Random(1)
    lines = list(sentences(count * LINES[1], seed=2))
    return tuple(" ".join(rng.sample(lines, rng.randint(*LINES))) for _ in range(count))


def ours(folder: Path, texts: tuple[str, ...]) -> tuple[float, Any]:
    """Embed texts as a worker does; return the CPU seconds, from texts to vectors, and the vectors."""
    from protocol.checkpoint import EMBED
    from protocol.spec import WorkerSpec
    from protocol.to_worker import EmbedPrompt, Generate, Sampling
    from worker.embedding.intake_and_loop import CPU_PASS_TOKENS, Preparer, take_group
    from worker.embedding.load_model import load_embedding_model

    reader = load_embedding_model(WorkerSpec("m", str(folder), 1, "", ""), EMBED, lambda *_: None)
    preparer = Preparer(reader)
    warm = preparer.job(Generate(1, EmbedPrompt(texts[:8]), Sampling()), 0.0)
    reader.compute(warm.items)
    begin = time.process_time()
    job = preparer.job(Generate(2, EmbedPrompt(texts), Sampling()), 0.0)
    while job.left:
        group = take_group([job], CPU_PASS_TOKENS)
        for place, row in zip(group, reader.compute([place.item for place in group]), strict=True):
            job.store(place.at, row)
    data = job.data()
    return time.process_time() - begin, np.frombuffer(data, "<f4").reshape(len(texts), -1)


def theirs(python: str, folder: Path, texts: tuple[str, ...]) -> tuple[float, Any]:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "vectors.npy"
        argv = [python, "-c", _THEIRS, str(folder), str(file)]
        own = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
        done = subprocess.run(argv, input=json.dumps(texts), capture_output=True, text=True, check=True, env=own)
        return float(json.loads(done.stdout.splitlines()[-1])), np.load(file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.embeddings", description=__doc__)
    parser.add_argument("--torch", required=True, help="an interpreter with torch and sentence-transformers")
    parser.add_argument("--texts", type=int, default=48)
    options = parser.parse_args(argv)
    if has_openblas() and "LD_PRELOAD" not in os.environ:
        # MLX's own CPU build uses the reference BLAS, which has a tenth of the speed of torch's.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.embeddings", *sys.argv[1:]], environment())
    texts = texts_of(options.texts)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        folder = build(Path(work))
        print(
            f"{'round':>5} {'mlxd texts/CPU s':>17} {'sentence-transformers':>22} {'÷':>6} {'largest difference':>19}"
        )
        for at in range(ROUNDS):
            own_s, own = ours(folder, texts)
            other_s, other = theirs(options.torch, folder, texts)
            rates = len(texts) / own_s, len(texts) / other_s
            apart = float(np.abs(own - other).max())
            print(
                f"{at + 1:>5} {rates[0]:>17.1f} {rates[1]:>22.1f} {rates[0] / rates[1]:>6.2f} {apart:>19.1e}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
