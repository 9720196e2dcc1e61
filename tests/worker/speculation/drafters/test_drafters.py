"""Drafters in folders of their own: a head, EAGLE-3, and those that are not run."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.drafters import eagle, write_config
from tests.support.engine import EngineHarness, spec
from tests.support.heads import build_with_head
from tests.support.models import VOCAB
from tests.worker.engine.test_exact import requests, tokens
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel
from worker.speculation.drafters.mtp_and_eagle_heads import EagleHead
from worker.start.checked_model import load_checked
from worker.tools.verify.verifier import EagerDrafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_with_head("qwen3", tmp_path_factory.mktemp("target") / "model")


def eager(loaded: LoadedModel) -> EagerDrafts:
    assert loaded.proposer is not None
    return EagerDrafts(loaded.proposer, 3)


@pytest.mark.soak
def test_rows_with_drafts_of_eagle_equal_each_alone_without(target: Path, tmp_path: Path) -> None:
    batch, draft = requests(8), eagle(tmp_path / "eagle")
    with EngineHarness(spec(target, speculate="off")) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
    with EngineHarness(spec(target, draft=str(draft)), drafter=eager) as engine:
        assert [tokens(result) for result in engine.run(batch)] == alone
        drafter = engine.drafter
    assert isinstance(drafter, EagerDrafts)
    assert drafter.drafted > 100


def test_eagle_is_fed_as_mlx_vlm_feeds_it(target: Path, tmp_path: Path) -> None:
    from mlx_vlm.speculative.drafters import load_drafter

    folder = eagle(tmp_path / "eagle")
    model = load_checked(spec(target, speculate="off"), lambda *_: None).model
    ours, _ = EagleHead.load(folder, model, VOCAB, mx.float32)
    theirs, _ = load_drafter(str(folder))
    theirs.reset(model)
    ids, states = mx.array([[20, 21, 22]]), mx.random.normal((1, 3, 3 * 64))
    expected = theirs._forward_tokens(ids, states, mx.int32)
    state = ours(ids, ours.hidden(states), ours.make_caches())
    assert mx.allclose(state, expected, atol=1e-4)
    best = theirs._draft_to_target(mx.argmax(theirs._logits(expected), axis=-1), mx.int32)
    assert mx.argmax(ours.logits(state), axis=-1).tolist() == best.tolist()


def test_a_head_in_a_folder_of_its_own_drafts(target: Path, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "head", model_type="qwen3_5_mtp", block_size=3)
    weights: Any = mx.load(str(target / "mtp.safetensors"))
    names = {name.removeprefix("mtp."): array for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), names, {"format": "mlx"})
    bare = shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("mtp.safetensors"))
    with EngineHarness(spec(bare, draft=str(folder)), drafter=eager) as engine:
        engine.run([Generate(1, TokensPrompt((20, 21, 22)), Sampling(temperature=0.0, ignore_eos=True), 30)])
        drafter = engine.drafter
    assert isinstance(drafter, EagerDrafts)
    assert drafter.accepted > 10


@pytest.mark.parametrize("kind", ["nemotron_h_mtp", "muse_assistant", "eagle2"])
def test_other_drafters_are_refused_with_the_reason(kind: str, target: Path, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "other", model_type=kind)
    with pytest.raises(LoadFailed, match=f"drafters of the kind {kind} are not run"):
        load_checked(spec(target, draft=str(folder)), lambda *_: None)


def test_eagle_for_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    for config in ({"target_hidden_size": 32}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 40]}):
        folder = eagle(tmp_path / "eagle", **config)
        with pytest.raises(LoadFailed, match="cannot draft for this model"):
            load_checked(spec(target, draft=str(folder)), lambda *_: None)


@pytest.mark.parametrize("first", [-1, VOCAB - 254])
def test_eagle_whose_tokens_lie_outside_of_the_target_s_is_refused(first: int, target: Path, tmp_path: Path) -> None:
    folder = eagle(tmp_path / "eagle")
    file = str(folder / "model.safetensors")
    weights: Any = mx.load(file)
    mx.save_safetensors(file, weights | {"d2t": mx.zeros(255, dtype=mx.int32) + first}, {"format": "mlx"})
    with pytest.raises(LoadFailed, match="its tokens are not the target's"):
        load_checked(spec(target, draft=str(folder)), lambda *_: None)
