import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.model_files.known_times import fixed_bytes
from gateway.model_files.metadata import Attention, Unreadable, attention, find, inspect, read_weights
from tests.support.ctl import ctl
from tests.support.scale import patient

PLAIN = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}
GIB = 1024**3


def folder(path: Path, tensors: dict[str, tuple[str, int]], config: dict[str, Any]) -> Path:
    """A model of which there is only the header: sizes in bytes, no data that anybody could read."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, (dtype, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_floating_point_weights_take_what_their_type_does_once_loaded(tmp_path: Path) -> None:
    path = folder(tmp_path, {"w": ("U32", 1000), "scales": ("BF16", 200), "norm": ("BF16", 20)}, PLAIN)

    assert read_weights(path, "bfloat16").loaded_bytes == 1220
    assert read_weights(path, "float32").loaded_bytes == 1000 + 440
    assert read_weights(path, "float32").disk_bytes == 1220
    assert read_weights(path, "bfloat16").number_bytes == 2


def test_kv_grows_by_two_vectors_a_layer_and_head() -> None:
    assert attention(PLAIN, 2) == Attention(2 * 4 * 8 * 8 * 2)
    assert attention(PLAIN | {"num_key_value_heads": 2, "head_dim": 16}, 2) == Attention(2 * 4 * 2 * 16 * 2)
    assert attention({"model_type": "vlm", "text_config": PLAIN}, 4) == Attention(2 * 4 * 8 * 8 * 4)


def test_windows_stop_growing_and_what_is_not_known_is_not_guessed() -> None:
    kinds = ["full_attention"] + ["sliding_attention"] * 3
    each = 2 * 8 * 8 * 2
    assert attention(PLAIN | {"layer_types": kinds, "sliding_window": 100}, 2) == Attention(each, 3 * each * 100)
    assert attention(PLAIN | {"sliding_window": 100}, 2) is None
    assert attention(PLAIN | {"sliding_window": 100, "use_sliding_window": False}, 2) == Attention(4 * each)
    assert attention(PLAIN | {"layer_types": ["linear_attention", "full_attention"]}, 2) is None
    assert attention(PLAIN | {"kv_lora_rank": 512}, 2) is None


def test_windows_by_a_pattern_stop_growing_in_all_layers_but_one_of_each_group() -> None:
    six = PLAIN | {"num_hidden_layers": 7, "sliding_window": 100}
    each = 2 * 8 * 8 * 2
    assert attention(six | {"sliding_window_pattern": 3}, 2) == Attention(2 * each, 5 * each * 100)
    assert attention(six | {"model_type": "gemma3_text"}, 2) == Attention(each, 6 * each * 100)
    assert attention({"text_config": six | {"model_type": "gemma3_text"}}, 2) == Attention(each, 6 * each * 100)
    assert attention(six | {"sliding_window_pattern": "LLG"}, 2) is None


FIXED = fixed_bytes(1_048_576, has_towers=False)


@pytest.mark.parametrize(("bits", "part"), [(8, 8.5 / 16), (4, 4.5 / 16)])
def test_quantized_kv_counts_with_its_scales_and_only_where_it_grows(bits: int, part: float, tmp_path: Path) -> None:
    wide = PLAIN | {"head_dim": 64}
    whole = attention(wide, 2)
    assert whole is not None
    assert attention(wide, 2, bits) == Attention(int(whole.token_bytes * part))
    kinds = ["full_attention", *["sliding_attention"] * 3]
    mixed = wide | {"layer_types": kinds, "sliding_window": 100}
    before, after = attention(mixed, 2), attention(mixed, 2, bits)
    assert before is not None
    assert after is not None
    assert (after.token_bytes, after.window_bytes) == (int(before.token_bytes * part), before.window_bytes)
    path = folder(tmp_path, {"w": ("F16", 1_048_576)}, wide)
    found = inspect(path, "float16", 0, 1 << 30, bits)
    assert (found.kv_1k_bytes, found.kv_bits, found.obstacles) == (int(whole.token_bytes * part) * 1000, bits, ())


def test_what_keeps_kv_from_being_quantized_is_said_before_a_load(tmp_path: Path) -> None:
    path = folder(tmp_path, {"w": ("F16", 1_048_576)}, PLAIN | {"head_dim": 80})
    (reason,) = inspect(path, "float16", 0, 1 << 30, 8).obstacles
    assert "kv_bits = 8" in reason
    assert "80 numbers" in reason
    assert inspect(path, "float16", 0, 1 << 30).obstacles == ()


@pytest.mark.parametrize(
    ("available", "fits", "verdict"),
    [
        (100_000, False, "its worker needs"),
        # Its weights fit, and with them nothing else that a worker has.
        (2_000_000, False, "its worker needs"),
        (FIXED + 1024 * 2 * 100, True, "up to 100 tokens"),
        (FIXED + 1024 * 2 * 5000, True, "5 sequences of the whole context of 1000"),
    ],
)
def test_the_verdict_compares_with_the_memory_that_is_there(
    tmp_path: Path, available: int, fits: bool, verdict: str
) -> None:
    path = folder(tmp_path, {"w": ("F16", 1_048_576)}, PLAIN | {"max_position_embeddings": 1000})

    found = inspect(path, "float16", 0, available)

    assert (found.fits, found.kv_1k_bytes) == (fits, 1_024_000)
    assert verdict in found.verdict


def test_a_truncated_file_is_said_and_no_traceback(tmp_path: Path) -> None:
    path = folder(tmp_path, {"w": ("F16", 8)}, PLAIN)
    (path / "model.safetensors").write_bytes(b"\xff" * 20)

    with pytest.raises(Unreadable, match="truncated"):
        read_weights(path, "auto")
    done = ctl(tmp_path, "info", str(path))
    assert done.returncode == 1
    assert done.stderr.startswith("mlxctl: ")
    assert done.stderr.count("\n") == 1


def test_a_header_longer_than_the_format_allows_is_refused_unread(tmp_path: Path) -> None:
    path = folder(tmp_path, {"w": ("F16", 8)}, PLAIN)
    length = 100_000_001
    with (path / "model.safetensors").open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length)

    with pytest.raises(Unreadable, match=f"header of {length} bytes, more than the 100000000 that the format allows"):
        read_weights(path, "auto")


def test_a_model_that_is_not_here_comes_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(Unreadable, match="mlxctl pull org/nope"):
        find("org/nope")


def test_the_demo_model_is_told_as_the_worker_loads_it(tmp_path: Path) -> None:
    done = ctl(tmp_path, "info", "default", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    # The worker's own measure, in a process of its own so that this one stays without MLX.
    script = (
        "from worker.start.checked_model import load_checked; from protocol.spec import WorkerSpec;"
        "from mlx_lm.models.cache import *;"
        "from worker.engine.scheduling.kv_budget import KvCost; import mlx.core as mx;"
        "spec = WorkerSpec(name='m', path='demo', epoch=1, down='', up='', batching='together');"
        "loaded = load_checked(spec, lambda *_: None);"
        "caches = make_prompt_cache(loaded.model); loaded.model(mx.array([[1] * 256]), cache=caches);"
        "print(loaded.weights_bytes, loaded.max_context, KvCost.of(caches, 256).token_bytes)"
    )
    measured = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patient(60), check=True
    )
    weights, context, token_bytes = map(int, measured.stdout.split())
    assert (found["weights_bytes"], found["context"], found["kv_1k_bytes"]) == (weights, context, token_bytes * 1000)


def test_nothing_of_mlx_is_imported() -> None:
    imports = "import sys, gateway.model_files.metadata, gateway.ctl.cli"
    script = f"{imports}; sys.exit(any('mlx' in name.split('.') for name in sys.modules))"

    assert subprocess.run([sys.executable, "-c", script], timeout=patient(30)).returncode == 0


def test_towers_are_told_by_config_and_names_of_weights(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": ("F32", 64),
        "vision_tower.blocks.0.weight": ("F32", 32),
        "model.visual.merger.weight": ("F32", 16),
        "model.language_model.visualizer.weight": ("F32", 8),
    }
    config = PLAIN | {"vision_config": {"depth": 1}, "audio_config": {"layers": 1}}
    info = inspect(folder(tmp_path, tensors, config), "float32", 0, GIB)

    assert (info.tower_bytes, info.weights_bytes) == (48, 120)
    assert info.modalities == ("image", "video", "audio")
    assert inspect(find("demo-vision"), "auto", 0, GIB).modalities == ("image", "video")
    assert inspect(find("demo"), "auto", 0, GIB).modalities == ()


@pytest.mark.parametrize(
    ("model_type", "tensor", "head"),
    [
        ("mimo", "model.mtp_layers.0.input_proj.weight", "run"),
        ("glm4_moe", "model.layers.4.eh_proj.weight", "run"),
        (
            "kimi_k3",
            "model.mtp.norm.weight",
            "its head is there and not used: those of kimi_k3 are not run",
        ),
        ("mimo", "model.layers.3.mlp.up_proj.weight", ""),
    ],
)
def test_a_head_is_told_by_its_tensors_and_whether_it_is_run_by_its_family(
    model_type: str, tensor: str, head: str, tmp_path: Path
) -> None:
    config = PLAIN | {"model_type": model_type}
    assert inspect(folder(tmp_path, {tensor: ("F32", 64)}, config), "float32", 0, GIB).head == head


def test_a_head_beside_the_weights_is_told_and_mlxctl_info_says_so(tmp_path: Path) -> None:
    assert inspect(find("demo"), "auto", 0, GIB).head == "run"
    assert "head       for multi-token prediction: drafts where that pays" in ctl(tmp_path, "info", "demo").stdout


def test_a_model_without_kv_has_the_longest_input_of_its_files_and_what_it_makes(tmp_path: Path) -> None:
    encoder = PLAIN | {"model_type": "bert", "max_position_embeddings": 512}
    path = folder(tmp_path, {"w": ("F32", 1_048_576)}, encoder)
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    found = inspect(path, "auto", 0, 4 * GIB)
    assert (found.kind, found.kv_1k_bytes, found.tokens_max, found.context) == ("embed", None, None, 256)
    assert inspect(path, "auto", 128, 4 * GIB).context == 128

    shown = ctl(tmp_path, "info", str(path)).stdout
    assert "KV" not in shown
    assert "context    256 tokens" in shown
    assert "fits: its worker needs" in shown


@pytest.mark.parametrize(("model_type", "made"), [("whisper", "transcripts"), ("qwen3_tts", "speech")])
def test_an_audio_model_makes_one_of_both_and_has_no_context_or_kv(tmp_path: Path, model_type: str, made: str) -> None:
    path = folder(tmp_path, {"w": ("F32", 1_048_576)}, {"model_type": model_type})
    lines = ctl(tmp_path, "info", str(path)).stdout.splitlines()

    assert f"makes      {made}" in lines
    assert not any(line.startswith(("KV", "context")) or "KV" in line for line in lines)


@pytest.mark.parametrize(("bits", "width", "warns"), [(4, 64, True), (4, 128, False), (8, 64, False), (0, 64, False)])
def test_four_bits_of_kv_are_warned_of_where_heads_are_small(
    tmp_path: Path, bits: int, width: int, warns: bool
) -> None:
    path = folder(tmp_path, {"w": ("F16", 1_048_576)}, PLAIN | {"head_dim": width})
    warning = inspect(path, "float16", 0, 1 << 30, bits).kv_warning

    assert ("perplexity" in warning) is warns
