"""`mlxctl verify` finds nothing on an exact model of each cache kind, and finds one that is not exact."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.checkpoint import EMBED
from protocol.spec import WorkerSpec
from protocol.verify_output import VerifyCheck
from tests.support.adapters import mlx_adapter
from tests.support.audio_models import build_moonshine, build_qwen_tts
from tests.support.drafters import copying_assistant, copying_block, damped, eagle, gemma4
from tests.support.engine import spec
from tests.support.models import ARCHITECTURES, build, shallow
from tests.support.reading_models import build_embedder, build_reranker
from tests.support.scale import scaled
from worker.embedding.load_model import EmbeddingInput, Numbers, load_embedding_model
from worker.start.checked_model import load_checked
from worker.tools.verify.__main__ import main, reader_checks
from worker.tools.verify.verifier import Verifier, reference_of

NAMES = [
    "alone", "perplexity", "first token", "batched", "chunks of 32", "cache in memory", "cache on disk", "preempted",
    "resumed", "speculated",
]  # fmt: skip


@pytest.mark.parametrize("architecture", scaled(["qwen3", "qwen3_moe", "gemma3_text", "qwen3_5"], ["qwen3_5"]))
def test_every_way_of_running_a_request_gives_its_own_tokens(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build(architecture, tmp_path / "model", **shallow(architecture))
    # A prefix that a worker writes is longer than the requests of the checks, as in the usual settings.
    wanted = msgspec.json.encode(spec(folder, disk_cache_tokens=512)).decode()
    assert main(["--spec", wanted, "--tokens", "12", "--words", "32"]) == 0
    checks = [msgspec.json.decode(line, type=VerifyCheck) for line in capsys.readouterr().out.splitlines()]
    assert [check.name for check in checks] == NAMES
    assert all(check.is_good and check.tokens for check in checks)
    assert [check.name for check in checks if check.cached] == [
        "first token", "cache in memory", "cache on disk",
    ]  # fmt: skip
    perplexity, first_token = (check.measured for check in checks[1:3])
    ours, theirs = re.match(r"([\d.]+), ([\d.]+) by mlx-lm", perplexity).groups()  # type: ignore[union-attr]
    assert float(ours) == pytest.approx(float(theirs), rel=1e-3)
    assert re.match(r"[\d.]+ s after \d+ new tokens, [\d.]+ s again$", first_token)


def without_a_layer(folder: Path) -> Path:
    """The same model with the last layer's output halved: what it generates stays equal in every way of running it."""
    import mlx.core as mx

    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    name = next(name for name in sorted(weights, reverse=True) if name.endswith("down_proj.weight"))
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    mx.save_safetensors(
        str(other / "model.safetensors"), weights | {name: 4 * weights[name]}, metadata={"format": "mlx"}
    )
    return other


def test_a_model_that_is_served_unlike_mlx_lm_runs_it_has_a_wrong_perplexity(
    model_folder: Callable[[str], Path],
) -> None:
    folder = model_folder("qwen3")
    wanted = spec(folder)
    theirs = reference_of(wanted)
    assert theirs.alone is not None
    verifier = Verifier(load_checked(spec(without_a_layer(folder)), lambda *_: None), wanted, 4, 8, reference=theirs)
    check = verifier._perplexity(theirs)  # pyright: ignore[reportPrivateUsage]
    assert check.is_wrong
    assert not check.is_good


def test_a_model_that_mlx_lm_does_not_run_has_no_perplexity_beside_it(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3").with_name("unheard_of")
    shutil.copytree(model_folder("qwen3"), folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"qwen3"', '"unheard_of"'))
    theirs = reference_of(spec(folder))
    assert theirs.alone is None
    assert "unheard_of" in theirs.reason


def test_caches_are_not_verified_of_a_model_that_reuses_no_prefixes(model_folder: Callable[[str], Path]) -> None:
    wanted = spec(model_folder("qwen3"), deterministic=True)
    checks = list(Verifier(load_checked(wanted, lambda *_: None), wanted, 4, 8)._cached())  # pyright: ignore[reportPrivateUsage]
    assert [(check.name, check.is_skipped, check.is_good) for check in checks] == [("cache in memory", True, True)]
    assert "deterministic" in checks[0].note


def drafted_by(kind: str, folder: Path) -> tuple[Path, Path]:
    """A model and what drafts for it."""
    match kind:
        case "assistant":
            target = gemma4(folder / "target")
            return target, copying_assistant(folder / "drafter", target)
        case "eagle3":
            return damped(folder / "target"), eagle(folder / "drafter")
        case "draft_model":
            return damped(folder / "target"), damped(folder / "drafter", 0.0)
        case _:
            target = damped(folder / "target")
            return target, copying_block(folder / "drafter", target, "dspark")


@pytest.mark.parametrize("kind", scaled(["draft_model", "eagle3", "dflash", "assistant"], ["dflash"]))
def test_drafts_of_each_kind_are_verified(kind: str, tmp_path: Path) -> None:
    target, drafter = drafted_by(kind, tmp_path)
    wanted = spec(target, draft=str(drafter))
    loaded = load_checked(wanted, lambda *_: None)
    assert loaded.proposer is not None
    assert loaded.proposer.source == kind
    verifier = Verifier(loaded, wanted, 8, 16)
    assert next(verifier.checks()).is_good
    check = verifier._drafted(loaded.proposer)  # pyright: ignore[reportPrivateUsage]
    assert check.name == f"drafted by {kind}"
    assert check.is_good
    assert check.tokens
    assert not check.note


@pytest.mark.soak
def test_sparse_prefills_are_verified_of_a_model_that_has_them(tmp_path: Path) -> None:
    target, drafter = drafted_by("draft_model", tmp_path)
    wanted = spec(target, draft=str(drafter), sparse_keep=0.5, sparse_from=4096)
    verifier = Verifier(load_checked(wanted, lambda *_: None), wanted, 8, 16)
    check = verifier._sparse()  # pyright: ignore[reportPrivateUsage]
    assert (check.name, check.requests) == ("sparse prefill", 3)
    assert check.is_good
    assert check.tokens
    assert not check.note


@pytest.mark.soak
@pytest.mark.parametrize(
    ("architecture", "bits"), [("qwen3", 4), ("qwen3", 8), ("gemma3_text", 4), ("gpt_oss", 8), ("qwen3_5", 4)]
)
def test_quantized_kv_gives_a_request_the_same_tokens_in_every_way_of_running_it(
    architecture: str, bits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"head_dim": 64, "num_hidden_layers": 2} if architecture == "qwen3" else {"head_dim": 64}
    if architecture == "qwen3_5":
        sizes = {"text_config": {**ARCHITECTURES[architecture][1]["text_config"], **sizes}}
    wanted = spec(build(architecture, tmp_path / "model", **sizes), kv_bits=bits)
    assert main(["--spec", msgspec.json.encode(wanted).decode(), "--tokens", "8", "--words", "16"]) == 0
    checks = [msgspec.json.decode(line, type=VerifyCheck) for line in capsys.readouterr().out.splitlines()]
    assert [check.name for check in checks] == [*NAMES, "dequantized"]
    assert all(check.is_good for check in checks)
    assert [check.name for check in checks if check.is_skipped] == (
        ["dequantized"] if architecture == "gpt_oss" else []
    )


@pytest.mark.soak
def test_pictures_are_verified_of_a_model_that_takes_them() -> None:
    wanted = spec(Path("demo-vision"), batching="together")
    checks = list(islice(Verifier(load_checked(wanted, lambda *_: None), wanted, 2, 2).checks(), 3))
    assert [check.name for check in checks] == ["alone", "two pictures", "batched"]
    text = 8
    assert [check.requests for check in checks] == [text + 4, 2, text + 4]
    assert all(check.is_good for check in checks)


def test_vectors_and_scores_are_verified_alone_and_beside_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (build_embedder("modernbert", tmp_path / "m"), build_reranker("bert", tmp_path / "n")):
        assert main(["--spec", msgspec.json.encode(spec(path)).decode()]) == 0
        checks = [msgspec.json.decode(line, type=VerifyCheck) for line in capsys.readouterr().out.splitlines()]
        assert [check.name for check in checks] == ["together", "equal lengths"]
        assert all(check.is_good and check.requests == 8 and check.drift < 1e-6 for check in checks)


@pytest.mark.soak
def test_what_is_heard_and_spoken_is_verified_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (build_moonshine(tmp_path / "hears"), build_qwen_tts(tmp_path / "speaks")):
        status = main(["--spec", msgspec.json.encode(WorkerSpec("m", str(folder), 1, "", "")).decode()])
        checks = [msgspec.json.decode(line, type=VerifyCheck) for line in capsys.readouterr().out.splitlines()]
        assert (status, [check.name for check in checks]) == (0, ["again"])
        assert checks[0].tokens > 0
        assert checks[0].is_good


def test_a_vector_that_others_change_is_found(tmp_path: Path) -> None:
    reader = load_embedding_model(spec(build_embedder("bert", tmp_path / "m")), EMBED, lambda *_: None)

    def compute(items: Sequence[EmbeddingInput]) -> Numbers:
        return reader.compute(items) + (0.1 if len(items) > 6 else 0)

    together, apart = reader_checks(replace(reader, compute=compute))
    assert len(together.differences) == 8
    assert apart.is_good


class Wobbly:
    """A model whose logits depend on who else is in the batch."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        logits = self._model(inputs, *args, **kwargs)
        return logits if inputs.shape[0] == 1 else logits[..., ::-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_model_that_is_not_exact_in_a_batch_is_found(model_folder: Callable[[str], Path]) -> None:
    wanted = spec(model_folder("qwen3"))
    loaded = load_checked(wanted, lambda *_: None)
    checks = Verifier(replace(loaded, model=Wobbly(loaded.model)), wanted, 4, 32).checks()
    found = {check.name: check for check in checks}
    assert found["alone"].is_good
    batched = found["batched"]
    assert not batched.is_good
    assert batched.differences[0].position < 4
    assert batched.differences[0].margin is not None


def test_a_model_that_is_not_there_is_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = msgspec.json.encode(spec(tmp_path / "nothing")).decode()
    assert main(["--spec", wanted]) == 66
    assert "nothing" in capsys.readouterr().err


@pytest.mark.soak
def test_each_adapter_is_verified_and_one_that_changes_nothing_is_found(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = model_folder("qwen3")
    good = mlx_adapter(tmp_path / "good", model, dora=True, keys=["self_attn.q_proj", "mlp.down_proj"])
    idle = mlx_adapter(tmp_path / "idle", model, scale=0.0, keys=["self_attn.q_proj"], layers=1)

    def verified(*folders: Path) -> dict[str, VerifyCheck]:
        adapters = tuple((folder.name, str(folder)) for folder in folders)
        loaded = load_checked(spec(model, adapters=adapters), lambda *_: None)
        checks = Verifier(loaded, spec(model, adapters=adapters), tokens=8, words=16).checks()
        return {check.name: check for check in islice(checks, 3)}

    checks = verified(good)
    assert all(check.is_good for check in checks.values())
    assert checks["adapters"].requests == 2
    assert checks["batched"].requests == checks["alone"].requests == 10
    found = verified(idle, tmp_path / "absent")["adapters"]
    assert not found.is_good
    assert "'idle' changes nothing" in found.note
    assert "there is no folder" in found.note
