"""Files of a model's folder in the layout of Hugging Face: configuration, weights and tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

Array: TypeAlias = np.ndarray[Any, Any]


def short(number: float) -> float:
    """A number that was stored in float32, as it was written before."""
    return float(np.format_float_scientific(np.float32(number), unique=True))


def empty(out: Path) -> None:
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)


def join(parts: list[Path], whole: Path) -> None:
    if not parts:
        raise FileNotFoundError("the parts of the GGUF file are missing")
    with whole.open("wb") as file:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, file)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def save(out: Path, config: dict[str, Any], weights: dict[str, Array]) -> None:
    empty(out)
    write_json(out / "config.json", config)
    arrays = {name: np.ascontiguousarray(weight, dtype=np.float32) for name, weight in weights.items()}
    save_file(arrays, out / "model.safetensors", metadata={"format": "mlx"})


def copy_without_weights(of: Path, out: Path) -> None:
    empty(out)
    for file in of.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, out)


def save_tokenizer(
    out: Path, tokenizer: Tokenizer, *, bos: str, eos: str, unk: str, pad: str, context: int, template: str | None
) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "pad_token": pad,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    write_json(out / "tokenizer_config.json", config | ({"chat_template": template} if template else {}))
