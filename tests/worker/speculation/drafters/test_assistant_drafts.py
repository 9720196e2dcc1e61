"""Gemma 4 assistants: drafts of the target's own keys and values, for the rows of a batch, as mlx-vlm makes for one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.drafted import Drafted
from tests.support.drafters import SIZE, assistant_config, copying_assistant, drafter, gemma4, store
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB, build
from tests.worker.engine.test_exact import requests, tokens
from worker.errors import LoadFailed
from worker.kv import batched
from worker.kv.quantized import KvForm, set_kv_form
from worker.model.loader import LoadedModel
from worker.speculation.drafters.assistant_drafts import Assistant, AssistantDrafts
from worker.speculation.drafters.proposers import attach_draft
from worker.start.checked_model import load_checked
from worker.tools.verify.verifier import EagerDrafts

COUNT = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma4(tmp_path_factory.mktemp("target") / "model")


def best(_uids: Sequence[int], logits: mx.array, _ahead: int) -> mx.array:
    return mx.argmax(logits, axis=-1)


ORDERED: dict[str, Any] = {"use_ordered_embeddings": True, "num_centroids": 32, "centroid_intermediate_top_k": 6}


@pytest.mark.parametrize("overrides", [{}, ORDERED], ids=["whole table", "clusters"])
def test_rows_of_a_batch_get_the_drafts_that_mlx_vlm_makes_for_each(
    overrides: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    """Rows shorter and longer than the window, some steps on, when the window's buffer has been written round."""
    model: Any
    model, _ = load_model(target)
    made = drafter(tmp_path / "drafter", assistant_config(**overrides))
    if made.masked_embedding is not None:
        made.masked_embedding.token_ordering = mx.random.permutation(VOCAB).astype(mx.int32)
    folder = store(made, tmp_path / "drafter")
    # Of each kind, the newest layer that has keys and values of its own.
    assistant, _ = Assistant.load(folder, model, {"sliding_attention": 2, "full_attention": 3}, VOCAB, mx.float32)
    proposer = AssistantDrafts(assistant)
    rows = {
        uid: [20 + (uid * 37 + at * 11) % 400 for at in range(length)] for uid, length in ((1, 50), (2, 9), (3, 70))
    }
    alone = {uid: make_prompt_cache(model) for uid in rows}

    def run(caches: Any, ids: list[list[int]]) -> mx.array:
        """Through the layers only: states before the last norm."""
        seen: list[mx.array] = []
        norm, model.model.norm = model.model.norm, lambda x: (seen.append(x), x)[1]
        try:
            mx.eval(model(mx.array(ids), cache=caches))
        finally:
            model.model.norm = norm
        return seen[0]

    states = {uid: run(alone[uid], [ids]) for uid, ids in rows.items()}
    caches = batched.merge([alone[uid] for uid in rows])
    drafted = [Drafted() for _ in rows]
    drafts = [row.draft for row in drafted]
    proposer.begin(best, lambda: (drafted, caches))
    proposer.capture.keep((mx.stack([state[0, -1:] for state in states.values()]),), drafts,
                       [len(ids) - 1 for ids in rows.values()], [1, 1, 1], [0, 0, 0])  # fmt: skip

    def theirs(uid: int) -> list[int]:
        reference: Any = drafter(tmp_path / "again", assistant_config(**overrides))
        reference.load_weights(str(folder / "model.safetensors"))
        reference.bind(model)
        sliding, full = alone[uid][2], alone[uid][3]
        # At their places: mlx-vlm counts them from the window's first, and leaves out that one.
        gone = [(0, 0), (0, 0), (max(0, len(rows[uid]) - 32), 0), (0, 0)]
        windows = [mx.pad(sliding._temporal_order(each)[..., -32:, :], gone) for each in (sliding.keys, sliding.values)]
        shared = {
            "sliding_attention": tuple(windows),
            "full_attention": tuple(each[..., : len(rows[uid]), :] for each in (full.keys, full.values)),
        }
        end = len(rows[uid])
        reference.set_shared_kv(shared, end, position=end - 1, kv_valid_len=end)
        hidden = model.model.norm(states[uid][:, -1:])
        drafts = reference.draft_block(100 + uid, hidden, None, COUNT + 1, lambda logits: mx.argmax(logits, axis=-1))
        return drafts[0].tolist()

    def ours() -> list[list[int]]:
        texts = [np.array(ids, dtype=np.int32) for ids in rows.values()]
        return proposer.propose(drafted, texts, [100 + uid for uid in rows], COUNT)

    assert ours() == [theirs(uid) for uid in rows]
    for step in range(3):
        ids = {uid: [30 + 7 * uid + step] for uid in rows}
        together = run(caches, [[*each] for each in ids.values()])
        proposer.capture.keep((together,), drafts, [len(each) for each in rows.values()], [1, 1, 1], [0, 0, 0])
        for uid in rows:
            states[uid] = run(alone[uid], [ids[uid]])
            rows[uid] += ids[uid]
    assert ours() == [theirs(uid) for uid in rows]


def eager(loaded: LoadedModel) -> EagerDrafts:
    assert loaded.proposer is not None
    return EagerDrafts(loaded.proposer, 3)


@pytest.mark.soak
def test_rows_with_drafts_of_an_assistant_equal_each_alone_without(target: Path, tmp_path: Path) -> None:
    """Greedy and seeded, with filters and penalties, joining and leaving; of an assistant that knows the target."""
    batch, draft = requests(10), copying_assistant(tmp_path / "drafter", target)
    with EngineHarness(spec(target, prefill_chunk=64, speculate="off")) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
    with EngineHarness(spec(target, prefill_chunk=64, draft=str(draft)), drafter=eager) as engine:
        results: list[Result] = []
        for request in batch:
            seen = engine.gauges.step_seq
            results.append(engine.submit(request))
            engine.wait(lambda seen=seen, result=results[-1]: engine.gauges.step_seq > seen or result.terminals)
        engine.wait(lambda: all(result.terminals for result in results))
        drafts = engine.drafter
    assert [tokens(result) for result in results] == alone
    assert isinstance(drafts, EagerDrafts)
    assert drafts.drafted / 3 < drafts.accepted < drafts.drafted


@pytest.mark.parametrize(
    ("overrides", "settings", "reason"),
    [
        ({"backbone_hidden_size": 32}, {}, f"it is for states of 32, and the target's have {SIZE}"),
    ],
)
def test_an_assistant_that_cannot_draft_is_refused(
    overrides: dict[str, Any], settings: dict[str, Any], reason: str, target: Path, tmp_path: Path
) -> None:
    folder = store(drafter(tmp_path / "drafter", assistant_config(**overrides)), tmp_path / "drafter")
    with pytest.raises(LoadFailed, match=reason):
        load_checked(spec(target, draft=str(folder), **settings), lambda *_: None)


def test_an_assistant_beside_quantized_kv_is_refused(target: Path, tmp_path: Path) -> None:
    folder = store(drafter(tmp_path / "drafter", assistant_config()), tmp_path / "drafter")
    loaded = load_checked(spec(target, speculate="off"), lambda *_: None)
    set_kv_form(loaded.model, KvForm(8, 16))
    with pytest.raises(LoadFailed, match="the target's KV, which is quantized"):
        attach_draft(loaded, folder, lambda: loaded)


def test_an_assistant_beside_another_model_is_refused(tmp_path: Path) -> None:
    folder = store(drafter(tmp_path / "drafter", assistant_config()), tmp_path / "drafter")
    with pytest.raises(LoadFailed, match="cannot draft for this model"):
        load_checked(spec(build("qwen3", tmp_path / "qwen3"), draft=str(folder)), lambda *_: None)
