"""The prefix cache in the engine: what is found again is counted exactly, and never changes a token."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.from_worker import Finish, MissCode
from protocol.to_worker import Abort, Explain, Generate, Sampling, TokensPrompt
from tests.support import disk
from tests.support.conversations import TEMPLATES, Chat, with_template
from tests.support.engine import EngineHarness, spec
from tests.support.models import KINDS, SAMPLE, build
from tests.support.prefixes import GREEDY, SHARED, cached, family, said, words
from tests.support.scale import scaled
from worker.prompt.miss_explainer import MissExplainer

CUTTABLE = ("qwen3", "llama", "qwen3_moe")


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("architecture", SAMPLE)
def test_tokens_are_the_same_cold_and_from_the_cache(architecture: str, model_folder: Callable[[str], Path]) -> None:
    batch = family(5)
    with EngineHarness(spec(model_folder(architecture), cache_bytes=0)) as engine:
        cold = said([engine.run([request])[0] for request in batch])
        assert all(cached(result) == 0 for result in engine.results.values())
    with EngineHarness(spec(model_folder(architecture))) as engine:
        one_by_one = [engine.run([request])[0] for request in batch]
        again = engine.run(batch)
    assert said(one_by_one) == cold
    assert said(again) == cold
    # The second time, all but the last token is there.
    sizes = [len(request.prompt.ids) for request in batch if isinstance(request.prompt, TokensPrompt)]
    assert [cached(result) for result in again] == [size - 1 for size in sizes]
    if architecture in CUTTABLE:
        assert [cached(result) for result in one_by_one] == [0] + [SHARED] * 4


@pytest.mark.parametrize(
    ("architecture", "template"),
    scaled(
        [(architecture, "rewrites history") for architecture in SAMPLE]
        + [(architecture, template) for architecture in KINDS for template in ("plain", "forgets reasoning")],
        [
            ("qwen3_5", "rewrites history"),
            ("gemma3_text", "plain"),
        ],
    ),
)
def test_a_conversation_finds_what_its_last_turn_has_in_common(
    architecture: str, template: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_template(model_folder(architecture), tmp_path / "model", TEMPLATES[template])
    with EngineHarness(spec(folder)) as engine:
        chat = Chat(engine)
        turns = list(chat.turns())
        last = engine.run([chat.request(99)])[0]
        turn_start = engine.loaded.tokenizer.encode("<|im_start|>", add_special_tokens=False)[0]
    assert len(turns) == 10
    for before, turn in pairwise(turns):
        shared = min(common(before.seen, turn.prompt), len(turn.prompt) - 1)
        # The plain template goes on where the last answer ended, and there every kind of cache has a checkpoint.
        if architecture in CUTTABLE or template == "plain":
            assert cached(turn.result) >= 0.95 * shared
        else:
            boundary = max(at for at, token in enumerate(turn.prompt[: shared + 1]) if token == turn_start)
            assert boundary > 0
            assert cached(turn.result) >= boundary
    with EngineHarness(spec(folder, cache_bytes=0)) as engine:
        assert said(engine.run([chat.request(99)])) == said([last])


def test_a_template_that_rewrites_history_is_named_as_the_cause(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_template(model_folder("qwen3"), tmp_path / "model", TEMPLATES["rewrites history"])
    with EngineHarness(spec(folder)) as engine:
        turns = list(Chat(engine).turns(2))
        explainer = MissExplainer(engine.intake.recent, engine.engine.cache, engine.intake.vocabulary.decode)
        # The second request goes on after the first, and the third asks a new question.
        going_on, asking = (explainer.explain(Explain(9, rid, shows_text=True)) for rid in (2, 3))
    assert going_on.causes == ()
    (cause,) = asking.causes
    assert (cause.code, cause.role) == (MissCode.THOUGHTS, "template")
    assert asking.other == 2
    assert cause.at == asking.common == common(turns[1].seen, turns[2].prompt)
    assert "lu por vi" in cause.old


@pytest.mark.parametrize(
    ("architecture", "window"),
    scaled(
        [(architecture, window) for architecture in ("gemma3_text", "gpt_oss") for window in (32, 4096)],
        [("gpt_oss", 32)],
    ),
)
def test_a_chat_under_a_sliding_window_keeps_no_token_twice_in_memory_or_on_disk(
    architecture: str, window: int, tmp_path: Path
) -> None:
    made = build(architecture, tmp_path / "made", sliding_window=window)
    folder = with_template(made, tmp_path / "model", TEMPLATES["plain"])
    on_disk = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_bytes": 1 << 30}
    with EngineHarness(spec(folder, **on_disk)) as engine:
        chat = Chat(engine)
        turns = list(chat.turns(3))
        last = engine.run([chat.request(99)])[0]
        cost, tokens = engine.kv_cost, len(turns[-1].seen) + 40
        whole = tokens * (cost.token_bytes + sum(each for each, _ in cost.windows))
        assert engine.engine.cache.nbytes < 1.1 * whole
    assert disk.size(tmp_path / "disk") < 1.3 * whole
    for before, turn in pairwise(turns):
        assert cached(turn.result) == common(before.seen, turn.prompt)
    with EngineHarness(spec(folder, **on_disk)) as engine:
        restored = engine.run([chat.request(99)])
        assert cached(restored[0]) > len(turns[-2].prompt), "from disk"
    with EngineHarness(spec(folder, cache_bytes=0)) as engine:
        assert said(engine.run([chat.request(99)])) == said([last]) == said(restored)


@pytest.mark.parametrize("architecture", KINDS)
def test_a_request_shares_the_prompt_of_one_that_still_decodes(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    first, second = (
        Generate(rid, TokensPrompt(words("shared", SHARED)), Sampling(seed=rid, ignore_eos=True), max_tokens=60)
        for rid in (1, 2)
    )
    with EngineHarness(spec(model_folder(architecture), cache_bytes=0)) as engine:
        alone = said([engine.run([request])[0] for request in (first, second)])
    with EngineHarness(spec(model_folder(architecture))) as engine:
        running = engine.submit(first)
        engine.wait(lambda: running.ids, "a first token")
        joined = engine.submit(second)
        engine.wait(lambda: running.terminals and joined.terminals, "both ends")
    assert said([running, joined]) == alone
    assert cached(joined) == SHARED - 1


@pytest.mark.parametrize("architecture", SAMPLE)
def test_identical_prompts_at_once_are_prefilled_once(architecture: str, model_folder: Callable[[str], Path]) -> None:
    size, copies = 300, 6
    batch = [
        Generate(rid, TokensPrompt(words("same", size)), Sampling(seed=rid), max_tokens=8)
        for rid in range(1, copies + 1)
    ]
    with EngineHarness(spec(model_folder(architecture), cache_bytes=0)) as engine:
        alone = said([engine.run([request])[0] for request in batch])
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=64)) as engine:
        results = engine.run(batch)
        processed = engine.gauges.prompt_tokens
    assert said(results) == alone
    assert sorted(cached(result) for result in results) == [0] + [size - 1] * (copies - 1)
    assert processed == size + copies - 1, "the last token of each, and the rest once"


@pytest.mark.parametrize("architecture", KINDS)
def test_equal_prompts_that_the_cache_has_no_room_for_are_prefilled_together(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    batch = [Generate(rid, TokensPrompt(words("same", 300)), GREEDY, max_tokens=2) for rid in range(1, 4)]
    with EngineHarness(spec(model_folder(architecture), cache_bytes=20_000, prefill_chunk=32)) as engine:
        rows = [engine.intake.row(request, 0.0) for request in batch]
        results = [engine.submit_row(row) for row in rows]
        engine.wait(lambda: all(result.terminals for result in results), "all ends")
    assert [cached(result) for result in results] == [0, 0, 0]
    assert max(row.stats.admitted for row in rows) < min(row.stats.first_token for row in rows)


def test_different_ends_of_a_shared_prompt_wait_for_it_and_run_it_once(model_folder: Callable[[str], Path]) -> None:
    batch = family(6, shared=400)
    with EngineHarness(spec(model_folder("qwen3"), prefill_chunk=64)) as engine:
        results = engine.run(batch)
    assert sorted(cached(result) for result in results) == [0] + [400] * 5


@pytest.mark.parametrize("architecture", [*scaled(["llama"], []), "gpt_oss", "qwen3_next"])
def test_an_aborted_prefill_leaves_a_prefix_that_is_right(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    prompt = TokensPrompt(words("long", 900))
    with EngineHarness(spec(model_folder(architecture), cache_bytes=0)) as engine:
        cold = said(engine.run([Generate(1, prompt, GREEDY, max_tokens=12)]))
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=32)) as engine:
        aborted = engine.submit(Generate(1, prompt, GREEDY, max_tokens=12, want_progress=True))
        engine.wait(lambda: len(aborted.progress) > 2, "some prefill")
        engine.command(Abort((1,)))
        engine.wait(lambda: aborted.terminals, "the end")
        again = engine.run([Generate(2, prompt, GREEDY, max_tokens=12)])
    assert aborted.finish == Finish.ABORT
    assert said(again) == cold
    assert cached(again[0]) >= 64


@pytest.mark.parametrize("architecture", ["qwen3", *scaled(["gpt_oss"], []), "qwen3_next"])
def test_a_prompt_that_is_only_prefilled_is_found_by_the_next_request(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    prompt = TokensPrompt(words("warm", 200))
    with EngineHarness(spec(model_folder(architecture))) as engine:
        cold = engine.run([Generate(1, prompt, GREEDY, max_tokens=12, cache_salt="cold")])
        first = engine.run([Generate(2, prompt, GREEDY, max_tokens=0)])[0]
        again = engine.run([Generate(rid, prompt, GREEDY, max_tokens=most) for rid, most in ((3, 0), (4, 12))])
    assert (first.ids, first.finish, cached(first)) == ([], Finish.LENGTH, 0)
    assert (again[0].ids, [cached(result) for result in again]) == ([], [199, 199])
    assert said(again[1:]) == said(cold)


def test_tenants_never_see_each_others_cache(model_folder: Callable[[str], Path]) -> None:
    prompt = TokensPrompt(words("secret", 200))
    requests = [
        Generate(rid, prompt, Sampling(temperature=0.8, seed=rid // 2), max_tokens=10, cache_salt="ab"[rid % 2])
        for rid in range(8)
    ]
    with EngineHarness(spec(model_folder("qwen3"), cache_bytes=0)) as engine:
        alone = said([engine.run([request])[0] for request in requests])
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        results = [engine.run([request])[0] for request in requests]
    assert [cached(result) for result in results] == [0, 0] + [199] * 6
    assert said(results) == alone
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        together = engine.run(requests)
    assert said(together) == alone
    assert sorted(cached(result) for result in together) == [0, 0] + [199] * 6
