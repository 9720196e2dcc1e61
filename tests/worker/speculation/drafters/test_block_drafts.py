"""DFlash, DFlash 2 and DSpark: blocks of tokens, for the rows of a batch, as mlx-vlm drafts them for one."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.drafted import Drafted
from tests.support.drafters import FORMS, LAYERS, SIZE, copying_block, damped, drafter, store
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB
from tests.support.scale import scaled
from tests.worker.engine.test_exact import requests, tokens
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel
from worker.speculation.drafters.block_head import BlockDrafts, BlockHead
from worker.start.checked_model import load_checked
from worker.tools.verify.verifier import EagerDrafts

COUNT = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damped(tmp_path_factory.mktemp("target") / "model")


def best(_rows: Sequence[Any], logits: mx.array, _ahead: int) -> mx.array:
    return mx.argmax(logits, axis=-1)


def text(row: int, length: int) -> list[int]:
    return [20 + (row * 37 + at * 11) % 400 for at in range(length)]


class Target:
    """Hidden states as a target would leave them in the capture: any states, of any rows."""

    def __init__(self, proposer: BlockDrafts) -> None:
        self.proposer = proposer
        self.states: dict[int, mx.array] = {}
        self.rows: defaultdict[int, Drafted] = defaultdict(Drafted)

    def run(self, added: dict[int, int], left: Sequence[int] = ()) -> None:
        """One pass, in which each row has so many tokens more; short rows are padded."""
        width, uids = max(added.values()), list(added)
        starts: list[int] = []
        rows: list[mx.array] = []
        for uid, count in added.items():
            before = self.states.get(uid, mx.zeros((0, 3 * SIZE)))
            new = mx.random.normal((width, 3 * SIZE))
            starts.append(len(before))
            rows.append(new)
            self.states[uid] = mx.concatenate([before, new[:count]])
        parts = tuple(mx.split(mx.stack(rows), 3, axis=-1))
        self.proposer.capture.keep(
            parts, [self.rows[uid].draft for uid in uids], starts, list(added.values()), left or [0] * len(uids)
        )

    def drafts(self, uids: Sequence[int]) -> list[list[int]]:
        texts = [np.array(text(uid, len(self.states[uid])), dtype=np.int32) for uid in uids]
        return self.proposer.propose([self.rows[uid] for uid in uids], texts, [100 + uid for uid in uids], COUNT)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_batch_get_the_drafts_that_mlx_vlm_makes_for_each(form: str, target: Path, tmp_path: Path) -> None:
    """Rows of unequal length, which join and leave, with one to several tokens more each time."""
    folder = store(drafter(tmp_path / "drafter", FORMS[form]), tmp_path / "drafter")
    model, _ = load_model(target)
    head, _ = BlockHead.load(folder, model, VOCAB, mx.float32)
    proposer = BlockDrafts(head, SIZE, mx.float32)
    proposer.begin(best, lambda: ([], []))
    mx.random.seed(1)
    ours = Target(proposer)

    def theirs(uid: int) -> list[int]:
        """Draft of a drafter that has seen all of a row."""
        model_of_theirs = drafter(tmp_path / "again", {**FORMS[form], "attention_k_eq_v": False})
        weights: Any = mx.load(str(folder / "model.safetensors"))
        # The form in which one projection makes keys and values fails in mlx-vlm.
        shared = {name.replace("k_proj", "v_proj"): array for name, array in weights.items() if "k_proj" in name}
        model_of_theirs.load_weights(list((shared | weights).items()))
        if model_of_theirs.embed_tokens is None:
            # Without the checks of their own targets.
            DFlashDraftModel.bind(model_of_theirs, model)
        caches = model_of_theirs.make_cache()
        drafts = model_of_theirs.draft_block(
            100 + uid, ours.states[uid][None], caches, COUNT + 1, lambda logits: mx.argmax(logits, axis=-1)
        )
        return drafts[0].tolist()

    ours.run({1: 40, 2: 9})
    assert ours.drafts([1, 2]) == [theirs(1), theirs(2)]
    ours.run({1: 1, 2: 1, 3: 14})
    assert ours.drafts([1, 2, 3]) == [theirs(1), theirs(2), theirs(3)]
    ours.run({1: 4, 2: 1, 3: 3})
    assert ours.drafts([1, 3]) == [theirs(1), theirs(3)]
    ours.run({1: 1, 2: 2, 3: 1})
    proposer.discard(1)
    assert ours.drafts([2, 3]) == [theirs(2), theirs(3)]
    ours.run({2: 1, 3: 1})
    ours.run({2: 1, 3: 1})
    assert ours.drafts([3, 2]) == [theirs(3), theirs(2)]


def eager(loaded: LoadedModel) -> EagerDrafts:
    assert loaded.proposer is not None
    return EagerDrafts(loaded.proposer, 3)


@pytest.mark.parametrize(
    ("architecture", "form", "share"),
    scaled([("qwen3", "dflash", 0.2), ("qwen3_5", "dspark", 0.3)], [("qwen3_5", "dspark", 0.3)]),
)
def test_rows_with_drafts_of_blocks_equal_each_alone_without(
    architecture: str, form: str, share: float, tmp_path: Path
) -> None:
    """Greedy and seeded, with filters and penalties, joining and leaving; drafts of a drafter that knows the target."""
    target = damped(tmp_path / "target", 0.12 if architecture == "qwen3" else 0.3, architecture)
    batch, draft = requests(10), copying_block(tmp_path / "drafter", target, form)
    with EngineHarness(spec(target, prefill_chunk=64, speculate="off")) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
    with EngineHarness(spec(target, prefill_chunk=64, draft=str(draft)), drafter=eager) as engine:
        assert engine.engine.speculation == f"auto, with drafts by {draft}"
        results: list[Result] = []
        for request in batch:
            seen = engine.gauges.step_seq
            results.append(engine.submit(request))
            engine.wait(lambda seen=seen, result=results[-1]: engine.gauges.step_seq > seen or result.terminals)
        engine.wait(lambda: all(result.terminals for result in results))
        drafts = engine.drafter
    assert [tokens(result) for result in results] == alone
    assert isinstance(drafts, EagerDrafts)
    assert share * drafts.drafted < drafts.accepted < drafts.drafted


def test_seeded_rows_accept_blocks_that_are_drawn_with_their_own_noise(target: Path, tmp_path: Path) -> None:
    draft = copying_block(tmp_path / "drafter", target, "dspark")
    hot = [
        Generate(rid, TokensPrompt((20, 21, 22 + rid)), Sampling(temperature=0.8, seed=rid, ignore_eos=True), 40)
        for rid in (1, 2, 3)
    ]
    with EngineHarness(spec(target, draft=str(draft)), drafter=eager) as engine:
        engine.run(hot)
        drafts = engine.drafter
    assert isinstance(drafts, EagerDrafts)
    assert drafts.accepted > drafts.drafted / 5


def test_its_weights_and_kv_count_and_are_let_go(target: Path, tmp_path: Path) -> None:
    folder = store(drafter(tmp_path / "drafter", FORMS["dflash"]), tmp_path / "drafter")
    alone = load_checked(spec(target, speculate="off"), lambda *_: None)
    both = load_checked(spec(target, draft=str(folder)), lambda *_: None)
    size = sum(array.nbytes for array in dict(mx.load(str(folder / "model.safetensors"))).values())
    assert both.weights_bytes == alone.weights_bytes + size
    proposer: Any = both.proposer
    assert proposer.longest == 7
    proposer.begin(best, lambda: ([], []))
    fed = Target(proposer)
    fed.run({1: 40})
    assert len(fed.drafts([1])[0]) == COUNT
    assert proposer.token_bytes == 2 * 2 * SIZE * 4
    assert proposer.nbytes > 40 * proposer.token_bytes
    proposer.end()
    assert (proposer.nbytes, proposer.capture.is_on) == (0, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, LAYERS]}}, "it needs the layers"),
        ({"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [1, 2, 3]}}, "its mask is token"),
        ({"hidden_size": 32}, "cannot draft for this model"),
        ({"block_size": 1}, "its blocks have 1 tokens"),
        ({"vocab_size": VOCAB // 2}, "it selects among"),
        ({"model_type": "laguna"}, "cannot draft for this model"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    changes: dict[str, Any], reason: str, target: Path, tmp_path: Path
) -> None:
    config = {**FORMS["dflash2" if "vocab_size" in changes else "dflash"], **changes}
    try:
        folder = store(drafter(tmp_path / "drafter", config), tmp_path / "drafter")
    except Exception:  # nor can mlx-vlm make it
        folder = tmp_path / "drafter"
    with pytest.raises(LoadFailed, match=reason):
        load_checked(spec(target, draft=str(folder)), lambda *_: None)
