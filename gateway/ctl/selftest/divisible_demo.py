"""The demo model with attention heads that two ranks can divide.

The demo has three KV heads. A fourth one of zeros, with its queries, adds nothing to any output: `o_proj` multiplies
it by zeros.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any, Final

from gateway.model_files.metadata import find

_WEIGHTS: Final = "model.safetensors"
_HEAD_COUNTS: Final = ("num_attention_heads", "num_key_value_heads")
_HEADER_LENGTH: Final = struct.Struct("<Q")


def write_divisible_demo(folder: Path) -> Path:
    """Write the model into a new folder, and return the folder."""
    source = find("demo")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_bytes())
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    added = {"q_proj": group * config["head_dim"], "k_proj": config["head_dim"], "v_proj": config["head_dim"]}
    more = dict(zip(_HEAD_COUNTS, (config[_HEAD_COUNTS[0]] + group, config[_HEAD_COUNTS[1]] + 1), strict=True))
    (folder / "config.json").write_text(json.dumps(config | more))
    (folder / _WEIGHTS).write_bytes(_padded((source / _WEIGHTS).read_bytes(), added))
    return folder


def _padded(weights: bytes, added: dict[str, int]) -> bytes:
    """Add rows of zeros to the projections that are named, and as many columns as `q_proj` gets rows to `o_proj`."""
    (length,) = _HEADER_LENGTH.unpack_from(weights)
    start = _HEADER_LENGTH.size + length
    header: dict[str, Any] = json.loads(weights[_HEADER_LENGTH.size : start])
    metadata = header.pop("__metadata__", {})
    parts: list[bytes] = []
    end = 0
    for name, tensor in header.items():
        first, last = tensor["data_offsets"]
        data = weights[start + first : start + last]
        projection = name.split(".")[-2]
        if rows := added.get(projection, 0):
            data += bytes(rows * len(data) // tensor["shape"][0])
            tensor["shape"][0] += rows
        elif projection == "o_proj":
            data = _widened(data, tensor["shape"], added["q_proj"])
            tensor["shape"][1] += added["q_proj"]
        tensor["data_offsets"] = [end, end + len(data)]
        end += len(data)
        parts.append(data)
    text = json.dumps({"__metadata__": metadata} | header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([_HEADER_LENGTH.pack(len(text)), text, *parts])


def _widened(data: bytes, shape: list[int], columns: int) -> bytes:
    rows = shape[0]
    width = len(data) // rows
    zeros = bytes(width // shape[1] * columns)
    return b"".join(data[row * width : (row + 1) * width] + zeros for row in range(rows))
