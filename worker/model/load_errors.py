"""Reasons of failed loads: what an exception of mlx-lm, mlx-vlm or transformers says about a model's files."""

import json
import re
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from mlx_lm.utils import _get_classes  # pyright: ignore[reportPrivateUsage]  # the class that refused the values

from protocol.checkpoint import file_json
from protocol.failures import Code
from worker.errors import LoadFailed, is_allocation_failure

# Message of mlx-lm and mlx-vlm for a model_type without a module.
_NO_ARCHITECTURE: Final = re.compile(r"Model type \S+ not supported")
_UNSUPPORTED: Final = re.compile(r"not supported\b(?! between)|\bunsupported\b(?! operand)", re.IGNORECASE)
_NUMBERS: Final = (int, float)


def explain(path: Path, config: dict[str, Any], error: BaseException) -> LoadFailed:
    """Return the failure of a load that raised `error`. `config` is the model's configuration, or empty."""
    text = str(error)
    reason = _sentence(text)
    if _NO_ARCHITECTURE.search(text):
        kind = config.get("model_type", "")
        return LoadFailed(Code.MODEL_UNSUPPORTED, f"mlx-lm has no architecture '{kind}' ({path})", detail=text)
    if "trust_remote_code" in text:
        return LoadFailed(
            Code.MODEL_UNSUPPORTED, f"{path} runs code of its own; allow it with trust_remote_code = true", detail=text
        )
    if is_allocation_failure(error):
        return LoadFailed(Code.OUT_OF_MEMORY, f"not enough memory to load {path}", detail=text)
    if isinstance(error, TypeError | AttributeError) and (mistyped := _mistyped(path, config)):
        return LoadFailed(Code.MODEL_CORRUPT, f"{path} could not be loaded: {mistyped}", detail=text)
    is_unsupported = isinstance(error, NotImplementedError) or _UNSUPPORTED.search(text)
    code = Code.MODEL_UNSUPPORTED if is_unsupported else Code.MODEL_CORRUPT
    return LoadFailed(code, f"{path} could not be loaded: {type(error).__name__}: {reason}", detail=text)


def _sentence(text: str) -> str:
    """Return the first line of a message, with the line after it if the first announces it: `… not in model:`."""
    first, _, rest = text.partition("\n")
    first, second = first.rstrip(), rest.partition("\n")[0].strip(" ,.")
    return f"{first} {second}" if first.endswith(":") and second else first.strip(" :")


def _mistyped(path: Path, config: dict[str, Any]) -> str:
    """Return which value in the files has a type that its reader does not expect; empty if none is known."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (key := _mistyped_key(part)):
            return f"its config.json gives {key} as {json.dumps(part[key])}"
    with suppress(OSError, ValueError):
        match file_json(path / "tokenizer_config.json"):
            case {"model_max_length": str() | list() | dict() as limit}:
                return f"its tokenizer_config.json gives model_max_length as {json.dumps(limit)}"
            case {}:
                pass
            case _:
                return "its tokenizer_config.json is not a JSON object"
    return ""


def _mistyped_key(config: dict[str, Any]) -> str:
    try:
        _, arguments = _get_classes(config)
        hints = get_type_hints(arguments)
    except (ValueError, TypeError, LookupError, AttributeError, NameError):  # an architecture without typed arguments
        return ""
    unfit = [key for key, hint in hints.items() if key in config and not _fits(config[key], hint)]
    # Published files have null for many keys that are not used, so any other value is a likelier cause.
    return min(unfit, key=lambda key: config[key] is None, default="")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value may have this type; mlx-lm does not distinguish whole numbers from others."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    kind = get_origin(hint) or hint
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS)
    return not isinstance(kind, type) or isinstance(value, kind)
