"""Command `python -m worker.tools.repack`: copies a model with its experts in separate records, layer by layer.

It prints a line per step. Exit statuses: 0, or 1 with the reason on standard error.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import msgspec
import psutil
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, save_model

from protocol.checkpoint import has_media
from protocol.model_files import (
    EXPERTS_INDEX,
    FOLDER,
    VERSION,
    ExpertIndex,
    ExpertLayer,
    ExpertTensor,
    has_index,
    weight_files,
)
from worker.errors import LoadFailed
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.experts import chosen_of, name_of, put, switches_of, to_bytes
from worker.model.loader import check_weights, folded_config, read_config, resolve

# Suffix of an incomplete folder, followed by the process id.
_PARTIAL: Final = ".partial-"
# Suffixes of files that are rewritten. All other files are copied, including a model's code.
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")


def main() -> None:
    parser = argparse.ArgumentParser(prog="worker.tools.repack", description=__doc__)
    parser.add_argument("source", help="folder, or repository in the local cache")
    parser.add_argument("target", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()
    try:
        source = resolve(args.source)
        check_weights(source)
        index = repack(source, args.target.expanduser().absolute(), args.trust_remote_code, _print)
    except (LoadFailed, ValueError, OSError) as error:
        sys.exit(f"{args.source} cannot be repacked: {error}")
    except Exception as error:  # code of any architecture and files with any content may raise any exception
        sys.exit(f"{args.source} cannot be repacked: {type(error).__name__}: {error}")
    _print(f"{args.target}: {index.total_bytes / 1e9:.2f} GB of experts in {len(index.layers)} layers")


def _print(text: str) -> None:
    print(text, flush=True)


def repack(source: Path, target: Path, trust_remote_code: bool, progress: Callable[[str], None]) -> ExpertIndex:
    """Write a model's folder to the folder `target`, which must not exist. Raises `ValueError` and `OSError`.

    Needs memory for the experts of one layer and for a shard of the other weights, and as much disk space as `source`.
    Until it is complete, the folder has a temporary name beside `target`; it is deleted if the work ends earlier. After
    a kill, the next repack to the same target deletes it.
    """
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} is there already")
    if has_index(source):
        raise ValueError(f"{source} is repacked already")
    config = read_config(source)
    if "quantization" not in config and "quant_method" in (config.get("quantization_config") or {}):
        raise ValueError("its weights are quantized in a format of others: convert it with mlx_lm.convert first")
    if has_media(config):
        raise ValueError("a model with image, video or audio towers cannot be repacked")
    _delete_leftovers(target, progress)
    needed = sum(file.stat().st_size for file in weight_files(source))
    if shutil.disk_usage(target.parent).free < needed:
        raise ValueError(f"{target.parent} has less than the {needed / 1e9:.1f} GB free that are needed")
    with checkpoint_view(source, {CONFIG: folded_config(config)}) as view:
        model, _ = load_model(view, lazy=True, trust_remote_code=trust_remote_code)
    switches = list(switches_of(model))
    if not switches:
        raise ValueError(f"{source} has no experts")
    # The process id separates the folders of processes that work on the same target.
    partial = target.with_name(f"{target.name}{_PARTIAL}{os.getpid()}")
    partial.mkdir()
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, partial, ignore_errors=True)
        index = _write(source, partial, model, switches, config, progress)
        partial.rename(target)
        undo.pop_all()
    return index


def _delete_leftovers(target: Path, progress: Callable[[str], None]) -> None:
    """Delete incomplete folders of this target whose process has ended."""
    ours = re.compile(re.escape(f"{target.name}{_PARTIAL}") + "([0-9]{1,9})")
    for path in target.parent.iterdir():
        name = ours.fullmatch(path.name)
        if name is None or path.is_symlink() or not path.is_dir():
            continue
        # A folder with this process's own id was left by an earlier process.
        if int(name[1]) == os.getpid() or not psutil.pid_exists(int(name[1])):
            progress(f"deleting {path}, left by a repack that was killed")
            shutil.rmtree(path, ignore_errors=True)


def _write(
    source: Path,
    folder: Path,
    model: Any,
    switches: list[tuple[str, Any]],
    config: dict[str, Any],
    progress: Callable[[str], None],
) -> ExpertIndex:
    (folder / FOLDER).mkdir()
    layers: list[ExpertLayer] = []
    for at, (path, switch) in enumerate(switches):
        progress(f"experts of layer {at + 1} of {len(switches)}")
        layers.append(_write_layer(folder / FOLDER, f"layer-{at:04d}.bin", path, switch))
        put(model, path, nn.Module())
        mx.clear_cache()
    progress("all else")
    save_model(folder, model)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copy(file, folder)
    chosen = chosen_of(config, min(layer.experts for layer in layers))
    index = ExpertIndex(VERSION, chosen, tuple(layers))
    (folder / FOLDER / EXPERTS_INDEX).write_bytes(msgspec.json.encode(index))
    return index


def _write_layer(folder: Path, name: str, path: str, switch: Any) -> ExpertLayer:
    tensors: list[ExpertTensor] = []
    arrays: list[mx.array] = []
    quantization: dict[str, tuple[int, int, str]] = {}
    end = 0
    for projection, module in switch.children().items():
        parameters: Any = tree_flatten(module.parameters())
        if hasattr(module, "group_size"):
            quantization[projection] = module.group_size, module.bits, module.mode
        for tensor, array in parameters:
            kind = name_of(array.dtype)
            if kind is None:
                raise ValueError(
                    f"{path}.{projection}.{tensor} has numbers of a kind that cannot be repacked ({array.dtype})"
                )
            size = array.nbytes // array.shape[0]
            tensors.append(ExpertTensor(projection, tensor, kind, tuple(array.shape[1:]), end, size))
            arrays.append(array)
            end += -(-size // 64) * 64
    experts = {array.shape[0] for array in arrays}
    if len(experts) != 1:
        raise ValueError(f"the tensors of {path} are of different numbers of experts")
    (count,) = experts
    with (folder / name).open("wb") as file:
        for expert in range(count):
            record = bytearray(end)
            for tensor, array in zip(tensors, arrays, strict=True):
                record[tensor.offset : tensor.offset + tensor.bytes] = to_bytes(array[expert])
            file.write(record)
    return ExpertLayer(path, name, count, end, tuple(tensors), quantization)


if __name__ == "__main__":
    main()
