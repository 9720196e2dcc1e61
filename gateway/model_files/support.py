"""Architectures that the installed MLX libraries can load. They are found by file names, without importing the
libraries.
"""

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from protocol.kinds import ENCODERS, audio_family

LIBRARIES: Final = ("mlx_lm", "mlx_vlm")
# Besides MLX's own quantization, mlx-lm's loader supports these methods.
_QUANT_METHODS: Final = frozenset({"awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8"})


def obstacles(config: dict[str, Any] | None, files: Sequence[str]) -> list[str]:
    """List the reasons why a repository cannot be loaded, each as a clause. `files` are the names of its files."""
    if config is None:
        return ["it holds no config.json"]
    reasons: list[str] = []
    if not any(is_weights(name) for name in files):
        reasons.append(_without_weights(files))
    reasons += architecture_obstacles(config)
    quantization = config.get("quantization_config")
    if "quantization" not in config and isinstance(quantization, dict):
        method = quantization.get("quant_method")
        if method is not None and method not in _QUANT_METHODS:
            reasons.append(f"its quantization is {method!r}, which MLX does not read")
    return reasons


def architecture_obstacles(config: dict[str, Any]) -> list[str]:
    """List the reasons why an architecture cannot be loaded, each as a clause."""
    if audio_family(config, ""):
        has_library = importlib.util.find_spec("mlx_audio") is not None
        return [] if has_library else ["mlx-audio, which hears and speaks, is not installed: mlxctl setup audio"]
    if not isinstance(model_type := config.get("model_type"), str):
        return ["its config.json names no model_type"]
    return (
        []
        if model_type in ENCODERS or _is_known(model_type)
        else [f"the installed mlx-lm has no architecture {model_type!r}"]
    )


def is_weights(name: str) -> bool:
    """Whether the loader reads a file: `model*.safetensors` in the top folder."""
    return name.startswith("model") and name.endswith(".safetensors") and "/" not in name


def _without_weights(files: Sequence[str]) -> str:
    endings = {Path(name).suffix for name in files}
    if ".gguf" in endings:
        return "its weights are GGUF, which is llama.cpp's; look for one of mlx-community"
    if endings & {".bin", ".pt", ".pth"}:
        return "its weights are PyTorch files, not safetensors"
    if ".safetensors" in endings:
        return "it holds no model*.safetensors: an adapter, or parts of something else"
    return "it holds no weights"


def _is_known(model_type: str) -> bool:
    """Whether an installed library supports an architecture. True if no library is installed, so that nothing is
    rejected.
    """
    specs = filter(None, map(importlib.util.find_spec, LIBRARIES))
    folders = [Path(spec.origin).parent for spec in specs if spec.origin]
    for folder in folders:
        name = _renamed(folder, model_type)
        if (folder / "models" / f"{name}.py").is_file() or (folder / "models" / name).is_dir():
            return True
    return not folders


def _renamed(folder: Path, model_type: str) -> str:
    """Look up a model type in `MODEL_REMAPPING` of the library's utils.py, which is read as text."""
    try:
        tree = ast.parse((folder / "utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return model_type
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="MODEL_REMAPPING")], value=ast.Dict() as names):
                return {str(key): str(value) for key, value in ast.literal_eval(names).items()}.get(
                    model_type, model_type
                )
            case _:
                pass
    return model_type
