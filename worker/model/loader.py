"""Loading of a model by name. Never downloads anything; raises errors with plain explanations.

Reasons of failed loads: what an exception of mlx-lm, mlx-vlm or transformers says about a model's files.

Tokenizer that tokenizer.json describes, whatever class tokenizer_config.json names.

transformers 5 builds normalizer and pre-tokenizer of some classes itself and takes only the vocabulary from
tokenizer.json, so that digits, spaces or accents become other tokens than in training.
"""

import json
import logging
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage]  # the class that refused the values
    load_model,
    load_tokenizer,
)
from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from protocol.checkpoint import CONTEXT_KEYS, UnusableRope, context_of, file_json, has_media
from protocol.failures import Code
from protocol.model_files import UnusableWeights, check_tensors, has_index, read_index, weight_files
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from worker.errors import LoadFailed, foreign_code, is_allocation_failure
from worker.model import packing
from worker.model.batch_mode import BatchModePlan
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.class_checks import check_activation, check_floats, check_head, check_rope, untied, warn_of_window
from worker.model.experts import attach as attach_experts
from worker.model.experts import experts_per_token, pass_tokens
from worker.model.linears import Linears
from worker.model.rank_split import Division
from worker.speculation.drafter import Proposer
from worker.vision.checkpoint import UnsupportedVision, fold, load_text_model, text_config
from worker.vision.tower import Vision, attach

log = logging.getLogger("mlxd.worker")

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


_DESCRIPTION: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
# The class of transformers that uses tokenizer.json as it is, and the key that names a class.
_PLAIN_CLASS: Final = {"tokenizer_class": "PreTrainedTokenizerFast"}
# Text that normalizers and pre-tokenizers treat differently. It begins with a space, because whether one is put before
# a text may be set in tokenizer_config.json.
_SAMPLE: Final = (
    " In 2024 there were 1234 cats, 100,000 birds and 3.14e-10 fish; it's We're don't STOP ifThen  two   three\ttab"
    " na\u00efve na\u0131\u0308ve e\u0301 \ufb01ne \uff21\uff22\uff11 \u00bd x\u00b2 \u65e5\u672c\u8a9e\u306e\u6587"
    " \u4e2d\u6587\u5b57 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441 \u0639\u0631\u0628\u064a \U0001f642 \u200bzero\u00a0wide"
    "\ndef f(x_1, y2):\n    return x_1 ** 2 != y2[0]  # 42\n\n\n\tfor(int i=0;i<10;++i){a[i]+=0xFF;}\r\n <html> end"
)
_WITHOUT_SPACE: Final = "In 2024 it began"
# Settings by which tokenizer_config.json changes on purpose what tokenizer.json describes.
_PREFIX_KEYS: Final = frozenset({"add_prefix_space", "legacy"})
_SPECIAL_KEYS: Final = frozenset({"add_bos_token", "add_eos_token"})
_LISTED_TOKENS: Final = 6


class _Differs(Exception):
    """Raised for a tokenizer that is not the described one; the text is the difference."""


def load_described(folder: Path, load: Callable[[Path, Mapping[str, Any]], Any]) -> Any:
    """Load the tokenizer of a folder with `load`, in the class that it names or else without a class of its own.

    `load` gets a folder and arguments for transformers' AutoTokenizer, and returns its tokenizer or mlx-lm's wrapper of
    it. Raises `LoadFailed`, and the errors of `load`.
    """
    settings = _settings(folder)
    if not (folder / _DESCRIPTION).exists() or "auto_map" in settings:  # code in the checkpoint is allowed or refused
        return load(folder, {})
    described = Tokenizer.from_file(str(folder / _DESCRIPTION))
    described.no_truncation()
    described.no_padding()
    named: Any = None
    try:
        with foreign_code(lambda error: _Differs(f"{type(error).__name__}: {error}"), _Differs):
            named = load(folder, {})
            return _checked(named, described, settings)
    except _Differs as difference:
        if named is None and not settings:  # no class is named that could be replaced
            return load(folder, {})
        specials = _special_tokens(named, described) if named is not None else {}
        changed = {**settings, **specials, **_PLAIN_CLASS}
        with checkpoint_view(folder, {_CONFIG: changed}) as view:
            # Some types of models have a class of tokenizers whatever tokenizer_config.json names, but not this one.
            tokenizer = load(view, {"config": PreTrainedConfig()})
        name = settings.get("tokenizer_class") or type(named).__name__
        try:
            _checked(tokenizer, described, settings)
        except _Differs as other:
            if named is not None and str(other) == str(difference):
                return named  # transformers mends some files on purpose, in every class
            message = f"{folder}: neither {name} nor the plain class reads its {_DESCRIPTION}: {difference}"
            raise LoadFailed(Code.MODEL_UNSUPPORTED, message) from difference
        log.warning("%s: %s differs from %s, which is used as it is: %s", folder, name, _DESCRIPTION, difference)
        return tokenizer


def _special_tokens(tokenizer: Any, described: Tokenizer) -> dict[str, str]:
    """Return the special tokens of a tokenizer by their names, such as `eos_token`; some are defaults of its class."""
    tokens = tokenizer.special_tokens_map.items()
    return {key: text for key, text in tokens if isinstance(text, str) and described.token_to_id(text) is not None}


def _settings(folder: Path) -> dict[str, Any]:
    try:
        content = file_json(folder / _CONFIG)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _checked(tokenizer: Any, described: Tokenizer, settings: Mapping[str, Any]) -> Any:
    """Return the tokenizer. Raises `_Differs` if it gives other tokens or texts than the described one.

    A class without a backend has its vocabulary from elsewhere.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    samples = [_SAMPLE] if _PREFIX_KEYS & settings.keys() else [_SAMPLE, _WITHOUT_SPACE]
    for sample in samples:
        wanted = described.encode(sample, add_special_tokens=False).ids
        _compare(described, tokenizer.encode(sample, add_special_tokens=False), wanted)
        if backend.decode(wanted, skip_special_tokens=False) != described.decode(wanted, skip_special_tokens=False):
            raise _Differs("its tokens become another text")
    if not _SPECIAL_KEYS & settings.keys():
        _compare(described, tokenizer.encode(samples[0]), described.encode(samples[0]).ids)
        _compare(described, tokenizer.encode(samples[0], samples[-1]), described.encode(samples[0], samples[-1]).ids)
    return tokenizer


def _compare(described: Tokenizer, ids: list[int], wanted: list[int]) -> None:
    if list(ids) == wanted:
        return
    at = next((at for at, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), min(len(ids), len(wanted)))
    ours, theirs = ([described.id_to_token(id) for id in each[at : at + _LISTED_TOKENS]] for each in (ids, wanted))
    raise _Differs(f"{ours} instead of {theirs}")


DEMO: Final = "demo"
DEMO_DIR: Final = Path(__file__).parents[1] / "demo_model"
DEMO_VISION: Final = "demo-vision"
# Models that are part of mlxd, by the name that replaces a path.
DEMOS: Final = {DEMO: DEMO_DIR, DEMO_VISION: DEMO_DIR.with_name("demo_vision")}
# Demo models, and an adapter for the first of them.
_EMBEDDED: Final = DEMOS | {"demo-adapter": DEMO_DIR.with_name("demo_adapter")}

_DTYPES: Final = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Context of a model if neither its files nor its class specify one.
_DEFAULT_CONTEXT: Final = 8192
# Limits above this number count as no limit, because a tokenizer without a limit has a number such as 1e30.
_UNLIMITED_TOKENS: Final = 1_000_000_000
# Endings of the files that a load reads.
_READ: Final = frozenset({".jinja", ".json", ".model", ".py", ".safetensors", ".txt"})
_GENERATION: Final = "generation_config.json"
_LFS_POINTER: Final = b"version https://git-lfs"
# Limit of headers, the same as MAX_HEADER_SIZE of huggingface/safetensors (safetensors/src/tensor.rs), whose own
# readers refuse longer headers, too.
_HEADER_BYTES_MAX: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model with its tokenizer (mlx-lm's wrapper), the limits of requests, and its batch mode."""

    model: Any
    tokenizer: Any
    path: Path
    model_type: str
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    weights_bytes: int
    plan: BatchModePlan = field(default_factory=BatchModePlan)
    # Media towers; None for a model without towers.
    vision: Vision | None = None
    # Reason why a model with towers is loaded without them.
    no_vision: str = ""
    # Model or head that drafts for this model.
    proposer: Proposer | None = None
    # Reason why the head in the checkpoint is not used.
    no_head: str = ""
    # Linear layers that adapters can change.
    linears: Linears | None = None
    # Names of the approximations with which the model computes, such as `kv-bits-8`. Answers list them in
    # `x-mlxd-relaxed`.
    deviations: tuple[str, ...] = ()
    # The loaded draft model, if drafts come from a language model.
    draft: "LoadedModel | None" = None
    # Number of rows of the model's embedding table, which may be padded beyond the vocabulary: the model can sample the
    # ids of the padding.
    table_rows: int = 0
    # Statistics of experts that are read from disk.
    experts: Stats | None = None
    # Number of experts of a layer that a token uses; 0 for a model without experts.
    experts_per_token: int = 0

    @property
    def pass_tokens(self) -> int:
        """Maximum number of tokens of a forward pass, of all rows together; 0 means no limit. It also holds for the
        draft model."""
        drafting = self.draft.experts_per_token if self.draft is not None else 0
        return pass_tokens(max(self.experts_per_token, drafting))


def load(spec: WorkerSpec, progress: Callable[[str, int, int], None], division: Division | None = None) -> LoadedModel:
    """Load the model of `spec`, or this rank's part of the model. Calls `progress(stage, done_bytes, total_bytes)`.

    Raises `LoadFailed`.
    """
    path = resolve(spec.path)
    config = read_config(path)
    total = check_weights(path)
    progress("weights", 0, total)
    with foreign_code(lambda error: explain(path, config, error)):
        if division is not None and spec.experts == "disk":
            raise LoadFailed(Code.BAD_CONFIG, "a model of a group has its experts in memory, not on disk")
        model, config, experts = _load_text(path, config, spec)
        check_rope(model, text_config(config))
        check_activation(model, text_config(config))
        check_floats(path, model)
        tables = _table_rows(model)
        if division is not None:
            division.take(model, config)
        cast(model, spec.dtype)
        mx.eval(model.parameters())
        _check_eos_key(config)
        tokenizer = _load_tokenizer(path, config, spec)
        if not tokenizer.encode("a"):  # transformers returns an empty tokenizer for a folder without a tokenizer
            raise LoadFailed(Code.MODEL_MISSING, f"{path} holds no tokenizer that can encode text")
    if spec.chat_template:
        tokenizer.chat_template, tokenizer.has_chat_template = spec.chat_template, True
    linears = Linears(model)
    vision, no_vision = _load_vision(path, config, model, spec)
    if division is None:
        packing.prepare(model)
    weights_bytes = nbytes(model) + (vision.tower.nbytes if vision is not None else 0)
    progress("weights", weights_bytes, weights_bytes)
    vocab_size = vocab_size_of(config, tokenizer)
    eos_ids = tuple(sorted(tokenizer.eos_token_ids))
    _check_eos(eos_ids, vocab_size)
    max_context = _context(config, model, tokenizer, spec.context)
    warn_of_window(path, model, text_config(config), max_context)
    progress("check", weights_bytes, weights_bytes)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        path=path,
        model_type=str(config.get("model_type", "")),
        vocab_size=vocab_size,
        # A position table may have fewer rows than the vocabulary, but token ids never index it.
        table_rows=min((rows for rows in tables if rows >= vocab_size), default=vocab_size),
        max_context=max_context,
        eos_ids=eos_ids,
        weights_bytes=weights_bytes,
        vision=vision,
        no_vision=no_vision,
        experts=experts,
        experts_per_token=experts_per_token(model, config),
        linears=linears,
    )


def _load_text(path: Path, config: dict[str, Any], spec: WorkerSpec) -> tuple[Any, dict[str, Any], Stats | None]:
    """Load the text model with its configuration, and the statistics of its experts on disk if it has any."""
    if spec.experts == "disk":
        return _load_without_experts(path, config, spec)
    if has_index(path):
        raise LoadFailed(Code.BAD_CONFIG, f'the experts of {path} are on disk: serve it with experts = "disk"')
    folded = folded_config(config)
    changed = untied(path, folded)
    with checkpoint_view(path, {CONFIG: changed, **_generation_config(path)}) as view:
        if has_media(config):
            model, loaded = load_text_model(view, spec.trust_remote_code)
        else:
            model, loaded = load_model(view, lazy=True, trust_remote_code=spec.trust_remote_code)
    check_head(path, model, changed, folded)
    return model, loaded, None


def _generation_config(path: Path) -> dict[str, dict[str, Any]]:
    """Return generation_config.json as the gateway reads it; mlx-lm ignores a file with a byte order mark."""
    with suppress(OSError, ValueError):
        content = file_json(path / _GENERATION)
        return {_GENERATION: content} if isinstance(content, dict) else {}
    return {}


def _load_without_experts(path: Path, config: dict[str, Any], spec: WorkerSpec) -> tuple[Any, dict[str, Any], Stats]:
    """Load a repacked model without its experts, which are read when they are chosen."""
    if not has_index(path):
        raise LoadFailed(
            Code.BAD_CONFIG, f'experts = "disk" needs a repacked model; make one: mlxctl repack {spec.name}'
        )
    try:
        index = read_index(path)
        with checkpoint_view(path, {CONFIG: folded_config(config)}) as view:
            model, config = load_model(view, lazy=True, strict=False, trust_remote_code=spec.trust_remote_code)
        _check_names(path, model, [layer.path for layer in index.layers])
        return model, config, attach_experts(model, path, index, spec.expert_cache_bytes)
    except (ValueError, OSError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{path} cannot be served from disk: {error}") from error


def _check_names(path: Path, model: Any, layers: Sequence[str]) -> None:
    """Raise `ValueError` if a parameter is in none of the files: its values would be random."""
    held: set[str] = set()
    for file in weight_files(path):
        arrays: Any = mx.load(str(file))
        held.update(arrays)
    parameters: Any = tree_flatten(model.parameters())
    prefixes = tuple(f"{layer}." for layer in layers)
    missing = [name for name, _ in parameters if name not in held and not name.startswith(prefixes)]
    if missing:
        raise ValueError(f"its files lack {len(missing)} tensors, such as {missing[0]}")


def _load_tokenizer(path: Path, config: Mapping[str, Any], spec: WorkerSpec) -> Any:
    def load_wrapped(folder: Path, settings: Mapping[str, Any]) -> Any:
        settings = {"trust_remote_code": spec.trust_remote_code, **settings}
        return load_tokenizer(folder, settings, eos_token_ids=config.get("eos_token_id"))

    return load_described(path, load_wrapped)


def folded_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as the classes of MLX's libraries read it. Raises `LoadFailed`."""
    try:
        return fold(config)
    except UnusableRope as error:
        raise LoadFailed(Code.MODEL_CORRUPT, str(error)) from error


def _load_vision(path: Path, config: dict[str, Any], model: Any, spec: WorkerSpec) -> tuple[Vision | None, str]:
    """Load the towers of a model; None with the reason if there are none. Raises `LoadFailed` if memory is short."""
    if not has_media(config):
        return None, ""
    if spec.group is not None:
        return None, "a group serves text only"
    try:
        with foreign_code(lambda error: explain(path, config, error), UnsupportedVision):
            return attach(path, config, model, lambda tower: cast(tower, spec.dtype)), ""
    except UnsupportedVision as reason:
        return None, str(reason)


def resolve(path: str) -> Path:
    """Find the folder of a model or an adapter: embedded, local, or a snapshot in the Hugging Face cache.

    Raises `LoadFailed`, also for a FIFO or a device in it that a load would read, perhaps forever.
    """
    folder = _folder(path)
    for entry in folder.iterdir():
        if entry.suffix in _READ and entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise LoadFailed(Code.MODEL_CORRUPT, f"{entry} is not a regular file")
    return folder


def _folder(path: str) -> Path:
    if path in _EMBEDDED:
        return _EMBEDDED[path]
    local = Path(path).expanduser()
    if path and local.is_dir():
        return local.resolve()
    if local.is_absolute() or path.startswith((".", "~")):
        raise LoadFailed(Code.MODEL_MISSING, f"there is no folder {path}")
    try:
        return Path(snapshot_download(path, revision=_main_commit(path), local_files_only=True))
    except IncompleteSnapshotError as error:
        # Downloads omit files that MLX does not read; `check_weights` detects missing weights.
        return Path(error.snapshot_path)
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
        raise LoadFailed(
            Code.MODEL_MISSING,
            f"{path} is neither a folder nor in the local Hugging Face cache; download it with: mlxctl pull {path}",
        ) from error


def _main_commit(repository: str) -> str | None:
    """Return the commit of `main` in the cache; None if there is none. huggingface_hub takes a line end in the file for
    a part of the commit."""
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    with suppress(OSError, ValueError):
        return (folder / "refs" / "main").read_text(encoding="utf-8").strip() or None
    return None


def check_weights(path: Path, list_files: Callable[[Path], Sequence[Path]] = weight_files) -> int:
    """Check that each weight file is complete and each tensor in one place; return the files' bytes.

    `list_files` lists the files. Raises `LoadFailed`.
    """
    try:
        files = {file.name: _check_safetensors(file) for file in list_files(path)}
        check_tensors(path, {name: tensors for name, (_, tensors) in files.items()})
    except UnusableWeights as error:
        raise LoadFailed(Code.MODEL_MISSING if error.is_missing else Code.MODEL_CORRUPT, str(error)) from error
    except OSError as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"the weights of {path} cannot be read: {error}") from error
    return sum(size for size, _ in files.values())


def _check_safetensors(file: Path) -> tuple[int, list[str]]:
    """Check that a file's header matches its length (format: github.com/huggingface/safetensors).

    Return its bytes and the names of its tensors.
    """
    size = os.stat(file).st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start == _LFS_POINTER[:8]:
            raise LoadFailed(Code.MODEL_CORRUPT, f"{file} is a git-lfs pointer, not the weights; run: git lfs pull")
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if header_bytes > size - 8:
            raise LoadFailed(Code.MODEL_CORRUPT, f"{file} is truncated or not a safetensors file")
        if header_bytes > _HEADER_BYTES_MAX:
            limit = f"{header_bytes} bytes, more than the {_HEADER_BYTES_MAX} that the format allows"
            raise LoadFailed(Code.MODEL_CORRUPT, f"{file} has a safetensors header of {limit}")
        try:
            header = json.loads(stream.read(header_bytes))
            header.pop("__metadata__", None)
            end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise LoadFailed(Code.MODEL_CORRUPT, f"{file} has a broken safetensors header") from error
    if 8 + header_bytes + end != size:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{file} is incomplete: {size} bytes instead of {8 + header_bytes + end}")
    return size, list(header)


def read_config(path: Path) -> dict[str, Any]:
    """Read the config.json of a model. Raises `LoadFailed`."""
    config_file = path / "config.json"
    if not config_file.exists():
        raise LoadFailed(Code.MODEL_MISSING, f"{path} holds no config.json")
    config = read_json(config_file)
    if "model_type" not in config:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{config_file} names no model_type")
    return config


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object in a model's folder. Raises `LoadFailed`."""
    try:
        content = file_json(file)
    except (OSError, ValueError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise LoadFailed(Code.MODEL_CORRUPT, f"{file} is not a JSON object")
    return content


def cast(model: Any, dtype: str) -> None:
    """Cast floating-point parameters; `auto` is float32 on a CPU, where half precision is slow, otherwise unchanged."""
    if dtype == "auto":
        if mx.default_device() != mx.Device(mx.cpu):
            return
        dtype = "float32"
    if dtype not in _DTYPES:
        raise LoadFailed(Code.BAD_CONFIG, f"unknown dtype '{dtype}'; one of auto, {', '.join(_DTYPES)}")
    target = _DTYPES[dtype]

    # mlx-lm's classes name parameters that need full precision, such as a router's bias or the logarithm of a decay.
    may_cast: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _path: True)

    def retyped(path: str, array: mx.array) -> mx.array:
        is_cast = mx.issubdtype(array.dtype, mx.floating) and (target == mx.float32 or may_cast(path))
        return array.astype(target) if is_cast else array

    model.update(tree_map_with_path(retyped, model.parameters()))


def nbytes(model: Any) -> int:
    """Return the bytes of a module's parameters."""
    parameters: Any = tree_flatten(model.parameters())
    return sum(int(array.nbytes) for _, array in parameters)


def _check_eos_key(config: dict[str, Any]) -> None:
    """Check the end-of-sequence ids, which mlx-lm reads from generation_config.json, else from config.json."""
    given = config.get("eos_token_id")
    ids: list[Any] = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise LoadFailed(
            Code.MODEL_CORRUPT,
            f"the model's files give eos_token_id as {json.dumps(given)}, which is not a token id or a list of them",
        )


def _check_eos(eos_ids: Sequence[int], vocab_size: int) -> None:
    beyond = [token for token in eos_ids if not 0 <= token < vocab_size]
    if beyond:
        raise LoadFailed(
            Code.MODEL_CORRUPT,
            f"the model's files give {beyond[0]} as an end-of-sequence token, beyond its {vocab_size} tokens",
        )


def vocab_size_of(config: dict[str, Any], tokenizer: Any) -> int:
    """Return the size of the vocabulary whose ids can all be embedded: the smaller one if config.json has two."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict) and part.get("vocab_size")]
    return min((_positive("vocab_size", part["vocab_size"]) for part in parts), default=len(tokenizer))


def _table_rows(model: Any) -> list[int]:
    """Return the number of rows of each embedding table, before any part of the model is replaced or divided."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.QuantizedEmbedding))
    return [int(table.weight.shape[0]) for table in tables]


def _context(config: dict[str, Any], model: Any, tokenizer: Any, wanted: int) -> int:
    """Return the context length in tokens. It is the length in config.json, but at most the operator's `wanted`. If
    config.json has none, it is `wanted`.

    If both are missing, the default of the model's class applies, then the tokenizer's limit.
    """
    named = context_of(config)
    if named is not None:
        own = _positive(*named)
        return min(own, wanted) if wanted else own
    limit = getattr(tokenizer, "model_max_length", None)
    stated = limit if isinstance(limit, int) and 0 < limit < _UNLIMITED_TOKENS else _DEFAULT_CONTEXT
    return wanted or _class_default(model) or stated


def _class_default(model: Any) -> int:
    """Return the context length in the arguments of the class or of its inner text model; 0 if there is none."""
    parts = (getattr(part, "args", None) for part in (model, getattr(model, "language_model", None)))
    values = (getattr(args, key, None) for args in parts if args is not None for key in CONTEXT_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _positive(key: str, value: Any) -> int:
    if not isinstance(value, int | float) or value < 1:
        raise LoadFailed(Code.MODEL_CORRUPT, f"the model's config.json gives {key} as {value!r}")
    return int(value)
