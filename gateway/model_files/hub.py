"""Repositories of the Hugging Face hub: their files and memory needs, known before a download.

The token is taken only from `HF_TOKEN`, and is sent only to the hub.

Architectures that the installed MLX libraries can load. They are found by file names, without importing the
libraries.
"""

import ast
import importlib.util
import json
import os
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import msgspec
from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import build_hf_headers, filter_repo_objects, hf_raise_for_status
from msgspec import Struct

from gateway.command_failed import CommandFailed
from gateway.model_files.hub_cache import MAIN
from gateway.model_files.metadata import ModelMetadata, TensorEntry, Weights, estimate, measure
from protocol.checkpoint import ENCODERS, audio_family, is_head, is_tower

LIBRARIES: Final = ("mlx_lm", "mlx_vlm")
# Besides MLX's own quantization, mlx-lm's loader supports these methods.
_QUANT_METHODS: Final = frozenset({"awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8"})


def config_obstacles(config: dict[str, Any] | None, files: Sequence[str]) -> list[str]:
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


# These are the files that mlx-lm and the tokenizers read. They include the dense layers of embedding models and the
# audio decoder of speech models.
WANTED: Final = (
    "*.json", "model*.safetensors", "mtp.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model",
    "*.txt", "*.jsonl", "*.jinja", "*_Dense/model.safetensors", "speech_tokenizer/*.safetensors",
)  # fmt: skip
TIMEOUT_S: Final = 30.0
_READERS: Final = 8
_CONFIG_BYTES_MAX: Final = 16 * 1024 * 1024


class HubFailed(CommandFailed):
    """The hub could not answer a request."""


class NoConnection(HubFailed):
    """The hub cannot be reached from this machine."""


class RemoteFile(Struct, frozen=True):
    """A file in a repository. `sha256` is empty for a small file, which the hub stores in git."""

    name: str
    size_bytes: int
    sha256: str


class Repository(Struct, frozen=True):
    """One revision of a repository. `revision` is the requested name, and `commit` is what the hub resolved it to."""

    id: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)

    def matching(self, patterns: Sequence[str]) -> tuple[RemoteFile, ...]:
        """Return the files that match one of `patterns`."""
        names = set(filter_repo_objects((file.name for file in self.files), allow_patterns=list(patterns)))
        return tuple(file for file in self.files if file.name in names)


def token() -> str | bool:
    """Return `HF_TOKEN`; or False, which makes the library send no token at all."""
    return os.environ.get("HF_TOKEN", "").strip() or False


def fetch_repository(repository: str, revision: str = MAIN) -> Repository:
    """Fetch a repository's file list and configuration. Raises `HubFailed`."""
    with translated_errors(repository, revision):
        info = HfApi(token=token()).model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    files = (
        RemoteFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs is not None else "")
        for file in info.siblings or ()
    )
    return Repository(repository, revision, info.sha or "", tuple(files))


def read_config(repository: Repository) -> dict[str, Any] | None:
    """Fetch config.json. Returns None if the repository has none. Raises `HubFailed`."""
    file = repository.file("config.json")
    if file is None or file.size_bytes > _CONFIG_BYTES_MAX:
        return None
    url = hf_hub_url(repository.id, file.name, revision=repository.commit)
    with translated_errors(repository.id, repository.revision):
        response = get_session().get(url, headers=build_hf_headers(token=token()), timeout=TIMEOUT_S)
        hf_raise_for_status(response)
    try:
        content = json.loads(response.content)
    except ValueError as error:
        raise HubFailed(f"the config.json of {repository.id} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise HubFailed(f"the config.json of {repository.id} is not a JSON object")
    return content


def read_weights(repository: Repository, dtype: str) -> Weights:
    """Measure the weights. Only the headers of the safetensors files are downloaded. Raises `HubFailed`."""
    names = sorted(file.name for file in repository.files if is_weights(file.name))
    if not names:
        raise HubFailed(f"{repository.id} holds no model*.safetensors file")
    api = HfApi(token=token())

    def tensors(name: str) -> list[TensorEntry]:
        headers = api.parse_safetensors_file_metadata(
            repository.id, name, revision=repository.commit, timeout=TIMEOUT_S
        )
        return [
            TensorEntry(tensor.dtype, tuple(tensor.shape), (begin, end), is_tower(key), is_head(key))
            for key, tensor in headers.tensors.items()
            for begin, end in [tensor.data_offsets]
        ]

    with translated_errors(repository.id, repository.revision), ThreadPoolExecutor(_READERS) as readers:
        return measure((tensor for part in readers.map(tensors, names) for tensor in part), dtype)


def inspect(
    repository: Repository, dtype: str, context: int, available_bytes: int, kv_bits: int = 0
) -> ModelMetadata | None:
    """Estimate a model's memory and whether it fits; None if unknown (see `obstacles`). Raises `HubFailed`."""
    config = read_config(repository)
    if config is None or not any(is_weights(file.name) for file in repository.files):
        return None
    weights = read_weights(repository, dtype)
    names = [file.name for file in repository.files]
    info = estimate(repository.id, config, weights, context, available_bytes, names, kv_bits)
    every = (*obstacles(repository, config), *info.obstacles)
    return msgspec.structs.replace(info, is_downloaded=False, obstacles=every)


def obstacles(repository: Repository, config: dict[str, Any] | None = None) -> list[str]:
    """List the reasons why a repository cannot be loaded. Raises `HubFailed`."""
    return config_obstacles(config or read_config(repository), [file.name for file in repository.files])


@contextmanager
def translated_errors(repository: str, revision: str = MAIN) -> Generator[None, None, None]:
    """Translate each error of the hub's libraries into one sentence. Raises `HubFailed`."""
    endpoint = constants.ENDPOINT
    try:
        yield
    except GatedRepoError:
        raise HubFailed(_gated(repository)) from None
    except RepositoryNotFoundError:
        hint = "that the account of HF_TOKEN may not see" if token() else "that needs a token in HF_TOKEN"
        raise HubFailed(f"{endpoint} has no repository {repository}, or a private one {hint}") from None
    except RevisionNotFoundError:
        raise HubFailed(f"{repository} has no revision {revision!r}") from None
    except RemoteEntryNotFoundError:
        raise HubFailed(f"a file of {repository} is gone from the hub; try again") from None
    except OfflineModeIsEnabled:
        raise NoConnection("HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the hub is not contacted") from None
    except HFValidationError:
        raise HubFailed(f"{repository!r} is not the name of a repository; write ORG/NAME") from None
    except HfHubHTTPError as error:
        raise HubFailed(_refused(repository, error.response.status_code)) from None
    except SafetensorsParsingError:
        raise HubFailed(f"a safetensors file of {repository} has a broken header") from None
    except httpx2.TimeoutException:
        raise NoConnection(f"{endpoint} does not answer in time") from None
    except LocalEntryNotFoundError:
        raise NoConnection(f"the connection to {endpoint} is lost; the partial download is kept") from None
    except httpx2.ConnectError as error:
        raise NoConnection(f"no connection to {endpoint} ({error})") from None
    except httpx2.HTTPError as error:
        raise HubFailed(f"{endpoint} cannot be reached: {error}") from None


def _gated(repository: str) -> str:
    place = f"{constants.ENDPOINT}/{repository}"
    if token():
        return f"{repository} is gated, and the account of HF_TOKEN has no access to it; ask for it at {place}"
    return f"{repository} is gated: ask for access at {place}, then put a token of your account in HF_TOKEN"


def _refused(repository: str, status: int) -> str:
    match status:
        case 401:
            return "the hub does not accept the token in HF_TOKEN"
        case 403:
            return f"the token in HF_TOKEN may not read {repository}"
        case 429:
            return "the hub says that this address asks too often (HTTP 429); try again later"
        case _:
            return f"the hub answered HTTP {status} for {repository}"
