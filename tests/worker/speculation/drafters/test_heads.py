"""Heads for multi-token prediction draft for the rows of a batch, and change no token."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec import structs

from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.heads import NEXTN, build_with_head, build_with_layer
from tests.support.scale import scaled
from tests.worker.engine.test_exact import requests, tokens
from worker.model.loader import LoadedModel
from worker.speculation.drafters.state_drafts import HeadDrafts
from worker.tools.verify.verifier import EagerDrafts

# How much the target's layers add to what the head copies.
DAMPING = {"qwen3": 0.12, "qwen3_5": 0.4, "qwen3_next": 0.4}


@pytest.fixture(scope="session")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("heads")

    def folder(architecture: str) -> Path:
        path = root / architecture
        if path.exists():
            return path
        if architecture in NEXTN:
            return build_with_layer(architecture, path)
        return build_with_head(architecture, path, damping=DAMPING[architecture])

    return folder


def eager(loaded: LoadedModel) -> EagerDrafts:
    assert loaded.proposer is not None, loaded.no_head
    return EagerDrafts(loaded.proposer, 3)


def drafts_of(engine: EngineHarness) -> EagerDrafts:
    assert isinstance(engine.drafter, EagerDrafts)
    return engine.drafter


@pytest.mark.parametrize("architecture", scaled([*DAMPING, "glm4_moe", "deepseek_v32", "glm_moe_dsa"], ["qwen3_5"]))
def test_rows_with_drafts_of_a_head_equal_each_alone_without(
    architecture: str, head_folder: Callable[[str], Path]
) -> None:
    """Greedy and seeded, with filters and penalties, joining and leaving."""
    batch, folder = requests(10), head_folder(architecture)
    with EngineHarness(spec(folder, prefill_chunk=64, speculate="off")) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
    with EngineHarness(spec(folder, prefill_chunk=64), drafter=eager) as engine:
        results: list[Result] = []
        for request in batch:
            seen = engine.gauges.step_seq
            results.append(engine.submit(request))
            engine.wait(lambda seen=seen, result=results[-1]: engine.gauges.step_seq > seen or result.terminals)
        engine.wait(lambda: all(result.terminals for result in results))
        drafter = drafts_of(engine)
    assert [tokens(result) for result in results] == alone
    assert 20 < drafter.accepted < drafter.drafted


def test_seeded_rows_accept_drafts_that_are_drawn_with_their_own_noise(head_folder: Callable[[str], Path]) -> None:
    hot = [
        Generate(rid, TokensPrompt((20, 21, 22 + rid)), Sampling(temperature=1.2, seed=rid, ignore_eos=True), 40)
        for rid in (1, 2, 3)
    ]
    with EngineHarness(spec(head_folder("qwen3")), drafter=eager) as engine:
        engine.run(hot)
        assert drafts_of(engine).accepted > drafts_of(engine).drafted / 4


@pytest.mark.soak
def test_rows_that_make_room_or_leave_or_are_resumed_keep_their_tokens(head_folder: Callable[[str], Path]) -> None:
    batch = [
        Generate(
            rid,
            TokensPrompt(tuple(20 + (rid * 31 + at * 7) % 400 for at in range(240))),
            Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True),
            max_tokens=290,
            resume=tuple(20 + (rid * 17 + at * 5) % 400 for at in range(250)),
        )
        for rid in (1, 2, 3)
    ]
    folder = head_folder("qwen3")
    with EngineHarness(spec(folder, speculate="off", cache_bytes=1 << 28)) as engine:
        alone = [engine.run([request])[0].ids for request in batch]
    with EngineHarness(spec(folder, cache_bytes=1 << 28), drafter=eager) as engine:
        cost = engine.kv_cost
        leaving = engine.submit(structs.replace(batch[0], rid=7))
        engine.wait(lambda: len(leaving.ids) > 5)
        engine.command(Abort((7,)))
        engine.wait(lambda: leaving.terminals == 1)
        assert leaving.ids == alone[0][: len(leaving.ids)]
        rest = [
            structs.replace(request, rid=100 + request.rid, resume=(*request.resume, *ids[:20]))
            for request, ids in zip(batch, alone, strict=True)
        ]
        assert [result.ids for result in engine.run(rest)] == [ids[20:] for ids in alone]
    small = spec(folder, cache_bytes=1 << 28, kv_bytes=cost.bytes(3, 512) + 1)
    with EngineHarness(small, drafter=eager) as engine:
        assert [result.ids for result in engine.run(batch)] == alone
        assert engine.gauges.preemptions > 0
        assert drafts_of(engine).accepted > 20


def test_a_head_drafts_by_itself_where_it_pays(head_folder: Callable[[str], Path]) -> None:
    """The speculator alone decides, by the times that it measures: it may, and what it does is told."""
    with EngineHarness(spec(head_folder("qwen3"))) as engine:
        engine.run([Generate(1, TokensPrompt((20, 21, 22)), Sampling(temperature=0.0, ignore_eos=True), 60)])
        assert engine.engine.speculation == "auto"
        assert "mtp" in [each.source for each in engine.gauges.snapshot().drafted]


def test_a_head_that_does_not_fit_is_named_and_the_model_served_without(tmp_path: Path) -> None:
    folder = build_with_head("qwen3", tmp_path / "model")
    weights: dict[str, mx.array] = mx.load(str(folder / "mtp.safetensors"))  # pyright: ignore[reportAssignmentType]
    weights["mtp.fc.weight"] = mx.zeros((32, 64))
    mx.save_safetensors(str(folder / "mtp.safetensors"), weights)
    with EngineHarness(spec(folder)) as engine:
        assert "without the checkpoint's head for multi-token prediction: its head does not fit" in (
            engine.engine.speculation
        )
        assert engine.run([Generate(1, TokensPrompt((20, 21)), Sampling(), 3)])[0].terminals == 1


def test_a_head_that_is_asked_no_more_holds_nothing(head_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(head_folder("qwen3")), drafter=eager) as engine:
        engine.run([Generate(1, TokensPrompt((20, 21, 22)), Sampling(temperature=0.0, ignore_eos=True), 12)])
        proposer = engine.loaded.proposer
    assert isinstance(proposer, HeadDrafts)
    assert proposer.nbytes > 0
    proposer.end()
    assert (proposer.nbytes, proposer.capture.is_on, len(proposer.capture.records)) == (0, False, 0)
