"""Loading: a model in memory, or one plain sentence about why not, with the code that tells the pool what to do."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, qwen3_5
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from gateway.model_files.metadata import inspect
from protocol.failures import Code, ExitStatus
from protocol.to_worker import ChatPrompt, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB, build
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel, check_weights, resolve
from worker.prompt.templates import Renderer
from worker.start.checked_model import load_checked


@pytest.fixture
def folder(tmp_path: Path, model_folder: Callable[[str], Path]) -> Path:
    """A copy of a good model, to be damaged."""
    copied = tmp_path / "model"
    shutil.copytree(model_folder("qwen3"), copied)
    return copied


def loaded(path: Path, **settings: Any) -> LoadedModel:
    return load_checked(spec(path, **settings), lambda *_: None)


def refused(path: Path, code: Code, **settings: Any) -> str:
    with pytest.raises(LoadFailed) as caught:
        loaded(path, **settings)
    failure = caught.value.failure
    assert failure.code is code, failure
    assert "\n" not in failure.message
    return failure.message


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **changes}))


def weights(folder: Path) -> Path:
    (file,) = folder.glob("model*.safetensors")
    return file


def dtypes(model: Any) -> set[mx.Dtype]:
    flat: Any = tree_flatten(model.parameters())
    return {array.dtype for _, array in flat}


def test_a_good_model_is_loaded_with_the_facts_requests_are_checked_against(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    model = load_checked(spec(folder), lambda stage, done, total: seen.append((stage, done, total)))
    assert (model.vocab_size, model.max_context, model.model_type) == (VOCAB, 4096, "qwen3")
    assert model.eos_ids == (2,)
    assert model.path == folder.resolve()
    assert [stage for stage, _, _ in seen] == ["weights", "weights", "check"]
    assert seen[-1][1] == seen[-1][2] == model.weights_bytes > 0


# -- files -------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_missing(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in refused(tmp_path / "nothing", Code.MODEL_MISSING)


@pytest.mark.parametrize("path", ["./nothing", "~/surely/nothing", "../nothing"])
def test_a_relative_folder_that_is_not_there_is_missing_and_no_repository(path: str) -> None:
    with pytest.raises(LoadFailed, match="there is no folder"):
        resolve(path)


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_repository_is_found_however_the_line_of_its_commit_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--org--model", "0123456789abcdef0123456789abcdef01234567"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_bytes((commit + end).encode())
    assert resolve("org/model") == repository / "snapshots" / commit


def test_a_file_is_no_model_folder(folder: Path) -> None:
    refused(weights(folder), Code.MODEL_MISSING)


def test_a_folder_without_a_config_holds_no_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json" in refused(folder, Code.MODEL_MISSING)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", '"qwen3"', "\xff\xfe", "{}", '{"a": 1}'])
def test_a_config_that_is_no_model_config_is_corrupt(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refused(folder, Code.MODEL_CORRUPT)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": None},
        {"model_type": 5},
        {"model_type": ["qwen3"]},
        {"hidden_size": "many"},
        {"hidden_size": 128},
        {"num_hidden_layers": 9},
        {"num_hidden_layers": None},
        {"vocab_size": 600},
        {"vocab_size": "all"},
        {"max_position_embeddings": "long"},
        {"text_config": []},
        {"text_config": "x"},
        {"quantization": {"bits": "four"}},
        {"quantization": 5},
        {"eos_token_id": "two"},
        {"eos_token_id": {"a": 1}},
    ],
    ids=str,
)
def test_a_config_that_does_not_fit_is_told_and_never_an_accident(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, **changes)
    code = None
    try:
        loaded(folder)
    except LoadFailed as error:
        code = error.failure.code
    assert code in {None, Code.MODEL_CORRUPT, Code.MODEL_UNSUPPORTED}


def test_a_folder_without_weights_says_what_it_looked_for(folder: Path) -> None:
    weights(folder).unlink()
    assert "model*.safetensors" in refused(folder, Code.MODEL_MISSING)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refused(folder, Code.MODEL_MISSING)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 5}}', '{"weight_map": null}'])
def test_a_broken_index_is_corrupt(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert "index.json" in refused(folder, Code.MODEL_CORRUPT)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 20, 1000, -1])
def test_truncated_weights_are_corrupt(folder: Path, keep: int) -> None:
    file = weights(folder)
    file.write_bytes(file.read_bytes()[:keep])
    assert file.name in refused(folder, Code.MODEL_CORRUPT)


def test_weights_with_bytes_too_many_are_corrupt(folder: Path) -> None:
    file = weights(folder)
    file.write_bytes(file.read_bytes() + b"\x00")
    refused(folder, Code.MODEL_CORRUPT)


@pytest.mark.parametrize(
    "header", [b"{}x", b"[]", b"5", b'{"a": 5}', b'{"a": {"data_offsets": 5}}', b'{"a": {"data_offsets": ["x", "y"]}}']
)
def test_a_broken_weights_header_is_corrupt(folder: Path, header: bytes) -> None:
    weights(folder).write_bytes(struct.pack("<Q", len(header)) + header)
    refused(folder, Code.MODEL_CORRUPT)


def test_a_header_of_absurd_length_is_corrupt_and_not_read(folder: Path) -> None:
    weights(folder).write_bytes(struct.pack("<Q", 2**63) + b"{}")
    refused(folder, Code.MODEL_CORRUPT)


def test_a_header_longer_than_the_format_allows_is_not_read(folder: Path) -> None:
    file, header = weights(folder), 100_000_001
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", header))
        stream.truncate(8 + header)  # a hole: nothing is on the disk
    message = refused(folder, Code.MODEL_CORRUPT)
    assert file.name in message
    assert "100000000" in message


def test_a_git_lfs_pointer_says_how_to_get_the_weights(folder: Path) -> None:
    weights(folder).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in refused(folder, Code.MODEL_CORRUPT)


def test_a_missing_tensor_is_corrupt(folder: Path) -> None:
    arrays: Any = mx.load(str(weights(folder)))
    arrays.pop("model.norm.weight")
    mx.save_safetensors(str(weights(folder)), arrays)
    refused(folder, Code.MODEL_CORRUPT)


def test_a_folder_without_a_tokenizer_is_missing_one(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refused(folder, Code.MODEL_MISSING)


def test_a_broken_tokenizer_is_corrupt(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    refused(folder, Code.MODEL_CORRUPT)


@pytest.mark.parametrize("given", ["<|im_end|>", [2, None], 2.5, [[2], 0], {"id": 2}, ["2"], True])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_that_is_no_token_id_is_named(folder: Path, name: str, given: Any) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    content = json.loads((folder / "config.json").read_text()) if name == "config.json" else {}
    (folder / name).write_text(json.dumps({**content, "eos_token_id": given}))
    assert f"eos_token_id as {json.dumps(given)}" in refused(folder, Code.MODEL_CORRUPT)


@pytest.mark.parametrize(("key", "value"), [("vocab_size", "260"), ("num_hidden_layers", [2]), ("head_dim", {})])
def test_a_value_of_another_type_in_the_configuration_is_named(folder: Path, key: str, value: Any) -> None:
    change_config(folder, **{key: value})
    message = refused(folder, Code.MODEL_CORRUPT)
    assert key in message
    assert "mlx-lm has no" not in message


@pytest.mark.parametrize("text", ['{"model_max_length": "32768"}', "[]"])
def test_a_tokenizer_configuration_that_no_tokenizer_reads_is_named(folder: Path, text: str) -> None:
    (folder / "tokenizer_config.json").write_text(text)
    assert "tokenizer_config.json" in refused(folder, Code.MODEL_CORRUPT)


def test_the_size_of_the_weights_is_known_before_they_are_loaded(folder: Path) -> None:
    assert check_weights(folder) == weights(folder).stat().st_size


# -- architectures -----------------------------------------------------------------------------------------------------


def test_an_architecture_that_mlx_lm_lacks_is_unsupported(folder: Path) -> None:
    change_config(folder, model_type="perceptron")
    assert "perceptron" in refused(folder, Code.MODEL_UNSUPPORTED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": {"group_size": 32, "bits": 4, "model.layers.0.mlp.up_proj": {"bits": 7}}}, "bits 7"),
        ({"rope_scaling": {"rope_type": "ntk2", "factor": 2.0}}, "ntk2"),
    ],
)
def test_what_an_architecture_does_not_support_is_said_and_not_that_there_is_none(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    change_config(folder, **changes)
    message = refused(folder, Code.MODEL_UNSUPPORTED)
    assert reason in message
    assert "mlx-lm has no" not in message


def test_code_of_a_model_runs_only_when_it_is_allowed(folder: Path) -> None:
    (folder / "own.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()\n")
    change_config(folder, model_file="own.py")
    assert "trust_remote_code" in refused(folder, Code.MODEL_UNSUPPORTED)
    assert not (folder / "ran").exists()
    refused(folder, Code.MODEL_CORRUPT, trust_remote_code=True)
    assert (folder / "ran").exists()


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16, mx.float32])
def test_weights_are_float32_on_cpu_however_they_are_stored(folder: Path, stored: mx.Dtype) -> None:
    arrays: Any = mx.load(str(weights(folder)))
    mx.save_safetensors(str(weights(folder)), {name: array.astype(stored) for name, array in arrays.items()})
    model = loaded(folder)
    assert dtypes(model.model) == {mx.float32}
    assert model.weights_bytes == sum(array.size * 4 for array in arrays.values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_dtype_that_is_asked_for_is_given(folder: Path, dtype: str) -> None:
    assert dtypes(loaded(folder, dtype=dtype).model) == {getattr(mx, dtype)}


def test_an_unknown_dtype_is_a_mistake_of_the_configuration(folder: Path) -> None:
    assert "float8" in refused(folder, Code.BAD_CONFIG, dtype="float8")
    with pytest.raises(LoadFailed) as caught:
        loaded(folder, dtype="float8")
    assert caught.value.exit_status is ExitStatus.BAD_CONFIG


def test_a_quantized_model_is_loaded_as_it_is_and_generates(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "q4", hidden_size=128, intermediate_size=128, head_dim=64)
    model, config = load_model(folder)
    model, config = quantize_model(model, config, group_size=64, bits=4)
    weights(folder).unlink()
    save_model(folder, model)
    save_config(config, config_path=folder / "config.json")
    with EngineHarness(spec(folder)) as engine:
        assert mx.uint32 in dtypes(engine.loaded.model)
        greedy = Sampling(temperature=0.0, ignore_eos=True)
        requests = [Generate(rid, TokensPrompt((20, 30, 40 + rid % 2)), greedy, max_tokens=8) for rid in range(4)]
        results = engine.run(requests)
    assert [len(result.ids) for result in results] == [8] * 4
    assert results[0].ids == results[2].ids


@pytest.mark.parametrize(("cap", "context"), [(0, 4096), (100, 100), (10**9, 4096)])
def test_the_context_is_the_model_s_own_unless_it_is_capped(folder: Path, cap: int, context: int) -> None:
    assert loaded(folder, context=cap).max_context == context


def silent(source: Path, folder: Path, **settings: Any) -> Path:
    """A copy of a model whose config.json says nothing of a context, unless `settings` do."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    for part in (config, config.get("text_config", {})):
        part.pop("max_position_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_whose_config_names_no_context_has_that_of_its_class(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = silent(model_folder("gemma3_text"), tmp_path / "plain")
    assert loaded(folder).max_context == gemma3_text.ModelArgs("gemma3_text").max_position_embeddings == 32768
    assert loaded(folder, context=131072).max_context == 131072, "the operator may know better"
    nested = silent(model_folder("qwen3_5"), tmp_path / "nested")
    assert loaded(nested).max_context == qwen3_5.TextModelArgs().max_position_embeddings


def test_a_model_without_any_context_of_its_own_has_its_tokenizer_s(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = silent(model_folder("mamba"), tmp_path / "m")
    assert loaded(folder).max_context == 4096
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": int(1e30)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert loaded(folder).max_context == 8192


@pytest.mark.parametrize("key", ["model_max_length", "max_seq_length"])
def test_the_gateway_reads_the_context_that_the_worker_loads(
    key: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = silent(model_folder("mamba"), tmp_path / "m", **{key: 700})
    assert loaded(folder).max_context == inspect(folder, "auto", 0, 1 << 30).context == 700


def test_what_a_model_says_must_not_be_cast_keeps_its_type(model_folder: Callable[[str], Path]) -> None:
    flat: Any = tree_flatten(loaded(model_folder("qwen3_5"), dtype="bfloat16").model.parameters())
    kept = {path.rpartition(".")[2] for path, array in flat if array.dtype == mx.float32}
    assert kept == {"A_log"}


def test_facts_of_a_nested_text_model_are_found(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "nested"
    shutil.copytree(model_folder("qwen3_5"), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    model = loaded(folder)
    assert (model.vocab_size, model.max_context) == (VOCAB, 4096)


def test_the_vocabulary_is_never_larger_than_the_embedding(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Ids beyond the embedding would be read from memory that is somebody else's."""
    folder = tmp_path / "nested"
    shutil.copytree(model_folder("qwen3_5"), folder)
    change_config(folder, vocab_size=VOCAB * 2)
    assert loaded(folder).vocab_size == VOCAB


# -- the Hugging Face cache ------------------------------------------------------------------------------------------


def cache(home: Path, repository: str, source: Path, *, revision: str = "main") -> Path:
    """A repository as `hf download` leaves it: blobs, a snapshot of links, a reference."""
    root = home / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        blob = root / "blobs" / f"{number:040x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (root / "refs").mkdir()
    (root / "refs" / revision).write_text("a" * 40)
    return snapshot


def resolved(*repositories: str, **environment: str) -> list[str]:
    """Their folders, or why there is none. In a process of its own: the library reads its environment at import."""
    code = (
        "import sys\nfrom worker.model.loader import resolve\nfrom worker.errors import LoadFailed\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(resolve(name))\n"
        "    except LoadFailed as error: print(error.failure.code.name, error.failure.message)"
    )
    keep = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", code, *repositories],
        env={**keep, **environment}, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3],
    ).stdout.splitlines()  # fmt: skip


def test_a_repository_in_the_local_cache_is_found_without_a_network(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    snapshot = cache(tmp_path / "hub", "org/tiny-model", model_folder("qwen3"))
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    found, missing = resolved("org/tiny-model", "org/other-model", **environment)
    assert Path(found) == snapshot
    assert missing.startswith("MODEL_MISSING")
    assert "mlxctl pull org/other-model" in missing


def test_a_repository_of_which_only_what_mlx_reads_was_downloaded_is_found(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """The library keeps a list of all files of the repository, and calls a snapshot without them incomplete."""
    snapshot = cache(tmp_path, "org/tiny-model", model_folder("qwen3"))
    (snapshot.parents[1] / "trees").mkdir()
    files = {name: {"size": 1, "blob_id": "0" * 40} for name in ("README.md", "config.json")}
    listing = {"format_version": 1, "files": files}
    (snapshot.parents[1] / "trees" / f"{'a' * 40}.json").write_text(json.dumps(listing))

    (found,) = resolved("org/tiny-model", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1")

    assert Path(found) == snapshot


@pytest.mark.parametrize("name", ["no//good", "a/b/c", "UPPER CASE", "-dash/..", "", "x" * 200, "org/model\x00"])
def test_a_name_that_is_no_repository_is_missing(name: str) -> None:
    with pytest.raises(LoadFailed) as caught:
        resolve(name)
    assert caught.value.failure.code is Code.MODEL_MISSING
    assert caught.value.exit_status is ExitStatus.MODEL_UNUSABLE


def test_a_snapshot_with_links_to_blobs_that_are_gone_is_missing_weights(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    snapshot = cache(tmp_path, "org/tiny-model", model_folder("qwen3"))
    (snapshot / "model.safetensors").resolve().unlink()
    assert "model*.safetensors" in refused(snapshot, Code.MODEL_MISSING)


def test_a_configured_template_takes_the_place_of_the_models_own(folder: Path) -> None:
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer = loaded(folder, chat_template=template).tokenizer

    assert tokenizer.has_chat_template
    assert Renderer(tokenizer).render(ChatPrompt([{"role": "user", "content": "hi"}])) == "<hi>"


@pytest.mark.parametrize("template", ["{% for m in messages %}\n{{ m }", "{{ x | no_such_filter }}"])
def test_a_configured_template_that_does_not_compile_is_refused_before_the_weights_are_read(
    template: str, tmp_path: Path
) -> None:
    message = refused(tmp_path / "no-such-model", Code.BAD_CONFIG, chat_template=template)

    assert message.startswith("the configured chat_template does not compile: ")
    assert "line" in message


def test_a_configured_template_may_refuse_a_chat_without_messages(folder: Path) -> None:
    assert loaded(folder, chat_template="{{ messages[0].content + 'x' }}")


@pytest.mark.parametrize("beyond", [VOCAB, [2, VOCAB + 90]])
def test_an_end_of_sequence_token_beyond_the_vocabulary_is_a_sentence(tmp_path: Path, beyond: object) -> None:
    message = refused(build("qwen3", tmp_path / "m", eos_token_id=beyond), Code.MODEL_CORRUPT)
    assert f"as an end-of-sequence token, beyond its {VOCAB} tokens" in message
