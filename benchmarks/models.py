"""Random-weight Qwen3 and Llama models to measure with, built once into `.cache/bench-models`.

Run it to build one and print where it is: `python -m benchmarks.models 50m`.

Every engine must generate exactly the tokens asked for, and give out a piece of text for each. Not every server knows
`ignore_eos`, so the weights see to it: the output rows of all special tokens, of tokens that are no text by themselves
(parts of UTF-8 sequences, a lone space) and of ids beyond the tokenizer are zero. Their logits are then exactly 0, and
the best of hundreds of others is above 0. The speed does not change: the same multiplications are done.
"""

import argparse
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.blas import CACHE, ROOT
from benchmarks.words import sentences

SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


class Geometry(msgspec.Struct, frozen=True):
    """The shape of a model. Change `recipe` when the builder changes what it writes."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True
    tokenizer_vocab: int = 4096
    recipe: int = 2
    architecture: str = "qwen3"


GEOMETRIES: Final[dict[str, Geometry]] = {
    "5m": Geometry(layers=6, hidden=256, ffn=640, heads=8, kv_heads=4, head_dim=32, vocab=4096),
    "50m": Geometry(layers=10, hidden=640, ffn=1728, heads=10, kv_heads=5, head_dim=64, vocab=4096),
    "qwen3-0.6b": Geometry(layers=28, hidden=1024, ffn=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936),
    "qwen3-8b": Geometry(
        layers=36, hidden=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936, tied=False
    ),
    "llama-8b": Geometry(
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        tied=False,
        architecture="llama",
    ),
}
# Class that `config.json` names, by architecture.
CLASSES: Final = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
DEMO: Final = ROOT / "worker" / "demo_model"


def build(name: str, dtype: str = "float32", root: Path = CACHE / "bench-models") -> Path:
    """Return the folder of a model, and build it if there is none. Raises KeyError for an unknown name."""
    geometry = GEOMETRIES[name]
    return once(f"{name}-{dtype}", [geometry, dtype, TEMPLATE], lambda work: write(work, geometry, dtype), root)


def demo(root: Path = CACHE / "bench-models") -> Path:
    """Return the folder of the demo model in float32: an engine that does not cast the original weights does so at each
    step.
    """
    weights = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()
    return once("demo-float32", [weights], _write_demo, root)


def _write_demo(folder: Path) -> None:
    import mlx.core as mx

    for file in DEMO.iterdir():
        if file.suffix == ".safetensors":
            tensors: Any = mx.load(str(file))
            widened = {name: value.astype(mx.float32) for name, value in tensors.items()}
            mx.save_safetensors(str(folder / file.name), widened, {"format": "mlx"})
        elif file.is_file():
            shutil.copy(file, folder)


def once(name: str, recipe: list[Any], write: Callable[[Path], None], root: Path = CACHE / "bench-models") -> Path:
    """Return the folder that `write` fills; it is filled again if its recipe changes."""
    folder = root / f"{name}-{hashlib.sha256(msgspec.json.encode(recipe)).hexdigest()[:8]}"
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    # The folder is renamed once it is filled, so that an existing folder is always complete.
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        write(work)
        work.chmod(0o755)
        work.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def write(folder: Path, geometry: Geometry, dtype: str) -> None:
    """Write tokenizer, config and weights."""
    import mlx.core as mx
    from mlx_lm.utils import save_config, save_model

    tokenizer = new_tokenizer(geometry.tokenizer_vocab)
    tokenizer.save_pretrained(folder)
    settings = config(geometry, dtype, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    mx.random.seed(0)
    module = import_module(f"mlx_lm.models.{geometry.architecture}")
    model: Any = module.Model(module.ModelArgs.from_dict(settings))
    model.set_dtype(getattr(mx, dtype))
    output = model.model.embed_tokens if geometry.tied else model.lm_head
    speak(output, tokenizer)
    mx.eval(model.parameters())
    save_model(folder, model)
    save_config(settings, config_path=folder / "config.json")


def speak(output: Any, tokenizer: Any) -> None:
    """Set the output rows of all tokens without text to zero."""
    import mlx.core as mx

    size = output.weight.shape[0]
    speaks = mx.array([float(token < len(tokenizer) and _is_text(tokenizer, token)) for token in range(size)])
    output.weight = (output.weight * speaks[:, None]).astype(output.weight.dtype)


def config(geometry: Geometry, dtype: str, eos: int) -> dict[str, Any]:
    """Return the content of the model's `config.json`."""
    return {
        "architectures": [CLASSES[geometry.architecture]],
        "model_type": geometry.architecture,
        "hidden_size": geometry.hidden,
        "num_hidden_layers": geometry.layers,
        "intermediate_size": geometry.ffn,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "rms_norm_eps": 1e-6,
        "vocab_size": geometry.vocab,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": geometry.tied,
        "eos_token_id": eos,
        "torch_dtype": dtype,
    }


def new_tokenizer(size: int, specials: Sequence[str] = SPECIALS, template: str = TEMPLATE) -> Any:
    """Train a byte-level BPE tokenizer on invented words."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(kinds.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(sentences(5_000, seed=2), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in specials if token not in ("<|im_end|>", "<|endoftext|>")],
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    tokenizer.chat_template = template
    return tokenizer


def _is_text(tokenizer: Any, token: int) -> bool:
    text = tokenizer.decode([token])
    return (
        token not in tokenizer.all_special_ids and text.isascii() and text.strip().isprintable() and bool(text.strip())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(GEOMETRIES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args()
    print(build(args.name, args.dtype))


if __name__ == "__main__":
    main()
