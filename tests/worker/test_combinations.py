"""Features together: each request says what it says alone and without the others, or the pair is refused."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.combined import CHANGING, DRAFTERS, ROWS, Asked, Models, asked, model_of, settings
from tests.support.engine import EngineHarness, Result, spec
from tests.support.scale import scaled
from tests.worker.engine.test_fused_prefill import generated
from tests.worker.structured.test_drafted_rows import Free
from worker.engine.scheduling import kv_budget
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel
from worker.prefix_cache.cache_and_eviction import MIN_TOKENS
from worker.prompt.limits_and_truncation import is_restricted
from worker.speculation.drafter import Drafter
from worker.speculation.policy import Speculator
from worker.start.checked_model import load_checked
from worker.tools.repack import repack
from worker.tools.verify.verifier import EagerDrafts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("combinations"))


def drafter_for(features: frozenset[str]) -> Callable[[LoadedModel], Drafter] | None:
    """All that a drafter says is verified, whether it pays or not."""

    def eager(loaded: LoadedModel) -> Drafter:
        assert loaded.proposer is not None, loaded.no_head
        return EagerDrafts(loaded.proposer, 3)

    def text(_loaded: LoadedModel) -> Drafter:
        drafter = Speculator()
        drafter.costs = Free()
        return drafter

    return eager if features & DRAFTERS.keys() else text if "text drafts" in features else None


def drafted(drafter: Drafter | None) -> int:
    match drafter:
        case EagerDrafts():
            return drafter.drafted
        case Speculator():
            return sum(counts.tokens for counts in drafter.counts.values())
        case _:
            return 0


def path_of(features: frozenset[str], models: Models) -> Path:
    return models.folder("repacked" if "experts on disk" in features else model_of(features))


def run(engine: EngineHarness, rows: Sequence[Asked]) -> list[Result]:
    """All at once."""
    results: list[Result] = []
    for each in rows:
        engine.results[each.request.rid] = Result(had=len(each.request.resume))
        row = engine.intake.row(each.request, 0.0)
        if is_restricted(each.request):
            engine.intake.rules.restrict(row, each.request)
        if each.images is not None:
            row.media, row.positions = each.images.media, each.images.positions
        results.append(engine.submit_row(row))
    engine.wait(lambda: all(result.terminals for result in results), "all terminal events")
    assert [result.failure for result in results] == [None] * len(results)
    return results


def alone(features: frozenset[str], models: Models) -> list[Result]:
    """Each request alone, on a worker that has of the features those that change tokens, and no others.

    Adapters are in the model's weights, but beside quantized KV, where a number that is rounded otherwise may be
    another code.
    """
    model, own = model_of(features), features & CHANGING
    own |= features & {"adapters"} if own & {"kv_bits"} else frozenset()
    is_fused = "adapters" in features - own
    results: dict[int, Result] = {}
    for name in sorted(set(ROWS)) if is_fused else [""]:
        rows = [each for each in asked(features) if not is_fused or each.request.adapter == name]
        folder = models.fused(name, model) if is_fused and name else models.folder(model)
        with EngineHarness(spec(folder, **settings(own, models, model))) as engine:
            for each in rows:
                plain = replace(each.request, adapter="") if is_fused else each.request
                results |= {plain.rid: run(engine, [Asked(plain, each.images)])[0]}
    return [results[rid] for rid in range(len(ROWS))]


def assert_same(results: Sequence[Result], expected: Sequence[Result], given: int = 0) -> None:
    for result, other in zip(results, expected, strict=True):
        assert result.ids == other.ids[given:]
        assert result.finish is other.finish
        entries = other.logprobs[len(other.logprobs) - len(result.logprobs) :]
        assert [each.token for each in result.logprobs] == [each.token for each in entries]
        prompt = [] if given else other.prompt_logprobs
        assert [each.id for each in result.prompt_logprobs] == [each.id for each in prompt]
        assert [each.logprob for each in result.prompt_logprobs] == pytest.approx(
            [each.logprob for each in prompt], abs=1e-3, nan_ok=True
        )
        values = [each.logprob for each in entries]
        assert [each.logprob for each in result.logprobs] == pytest.approx(values, abs=1e-3, nan_ok=True)


def is_other(one: Result, other: Result) -> bool:
    pairs = zip(one.logprobs, other.logprobs, strict=False)
    return one.ids != other.ids or any(abs(first.logprob - second.logprob) > 0.01 for first, second in pairs)


CASES = (
    ("adapters", "kv_bits", "head", "grammar"),
    ("adapters", "kv_bits", "draft model", "prompt scores"),
    ("adapters", "kv_bits", "EAGLE-3", "disk cache"),
    ("adapters", "kv_bits", "block", "prompt scores"),
    ("adapters", "kv_bits", "text drafts", "disk cache", "prompt scores"),
    ("adapters", "kv_bits", "sparse prefill", "text drafts", "grammar"),
    ("adapters", "experts on disk", "disk cache", "grammar", "prompt scores"),
    ("adapters", "images", "kv_bits", "text drafts", "prompt scores"),
    ("adapters", "images", "sparse prefill"),
    ("adapters", "experts on disk", "kv_bits", "preemption"),
    ("adapters", "assistant", "prompt scores"),
    ("prompt scores", "head", "grammar"),
    ("prompt scores", "EAGLE-3"),
    ("prompt scores", "preemption"),
    ("adapters", "sparse prefill", "draft model"),
    ("adapters", "images", "draft model", "grammar"),
    ("adapters", "images", "EAGLE-3", "kv_bits", "disk cache"),
    ("images", "block"),
    ("images", "head", "adapters"),
    ("images", "assistant"),
)
SMALL = CASES[0], CASES[4]
# The rows of the table in the documentation, each with its name there, and its columns.
FEATURES = {
    "adapters": "`adapters`",
    "kv_bits": "`kv_bits`",
    "sparse prefill": "`sparse_prefill`",
    "experts on disk": '`experts = "disk"`',
    "images": "images",
    "prompt scores": "prompt log-probabilities",
    "head": "drafts: head for multi-token prediction",
    "draft model": "drafts: draft model",
    "EAGLE-3": "drafts: EAGLE-3",
    "block": "drafts: DFlash, DSpark",
    "assistant": "drafts: Gemma 4 assistant",
    "text drafts": "drafts from text",
    "grammar": "grammars, tools that must be called",
    "disk cache": "prefix cache, in memory and on disk",
    "preemption": "preemption",
}
COLUMNS = tuple(FEATURES)[:6]
# Pairs that other tests hold.
ELSEWHERE = {
    ("sparse prefill", "disk cache"): (
        "test_nothing_of_a_sparse_prompt_is_stored_and_of_stored_ones_the_leading_part_is_reused"
    ),
    ("sparse prefill", "preemption"): "test_a_preempted_row_goes_on_as_it_would_have",
    ("images", "preemption"): "test_preempted_rows_are_as_alone",
}
# Pairs that are refused: the note of the documentation, and the test that holds it.
NOT_IN_ONE_REQUEST = {
    ("sparse prefill", "images"): "test_a_request_is_refused_by_name",
    ("sparse prefill", "prompt scores"): "test_a_request_is_refused_by_name",
}
REFUSED = {
    ("kv_bits", "assistant"): (2, "test_an_assistant_beside_quantized_kv_is_refused"),
    **{
        ("sparse prefill", kind): (3, "test_a_sparse_prefill_with_a_drafter_that_is_no_language_model_is_refused")
        for kind in ("head", "EAGLE-3", "block", "assistant")
    },
    **{
        ("experts on disk", kind): (4, "test_settings_that_experts_on_disk_cannot_have_are_refused")
        for kind in ("sparse prefill", *DRAFTERS, "text drafts")
    },
    ("experts on disk", "images"): (5, "test_a_model_with_towers_is_not_repacked"),
}


@pytest.mark.parametrize("case", scaled(CASES, SMALL), ids="+".join)
def test_rows_with_all_of_these_say_what_they_say_alone(
    case: tuple[str, ...], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = frozenset(case)
    rows, expected, model = asked(features), alone(features, models), model_of(features)
    own = settings(features, models, model)
    path = path_of(features, models)
    has_drafts = bool(features & {*DRAFTERS, "text drafts"})
    with EngineHarness(spec(path, **own), drafter=drafter_for(features)) as engine:
        results = run(engine, rows)
        assert_same(results, expected)
        # Of one prompt.
        assert is_other(results[2], results[4]) is ("adapters" in features)
        assert all(bool(result.prompt_logprobs) is ("prompt scores" in features) for result in results)
        # As another worker that has died left them; what they tell of their prompts the client has.
        given = [replace(each.request, resume=tuple(one.ids[:3])) for each, one in zip(rows, expected, strict=True)]
        resumed = [Asked(request, each.images) for request, each in zip(given, rows, strict=True)]
        assert_same(run(engine, resumed), expected, 3)
        assert bool(drafted(engine.drafter)) is has_drafts
        reads = engine.loaded.experts is not None and engine.loaded.experts.expert_misses > 0
        assert reads is ("experts on disk" in features)
        cost = engine.kv_cost
    kept = [result.usage.kept > 0 for result in results if result.usage is not None]
    assert kept == [each.request.sparse_keep is not None for each in rows]
    if "disk cache" in features:
        with EngineHarness(spec(path, **own), drafter=drafter_for(features)) as engine:
            again = run(engine, rows)
        assert_same(again, expected)
        sizes = [len(each.request.prompt.ids) for each in rows]  # type: ignore[union-attr]
        cached = [size - 1 if size >= MIN_TOKENS and "prompt scores" not in features else 0 for size in sizes]
        assert [result.usage.cached for result in again if result.usage is not None] == cached
    if "preemption" in features:
        monkeypatch.setattr(kv_budget, "STEP", 8)
        monkeypatch.setattr(kv_budget, "RESERVED_OUTPUT_TOKENS", 1)
        longest = max(len(each.request.prompt.ids) for each in rows)  # type: ignore[union-attr]
        room = {"kv_bytes": cost.bytes(own.get("max_running", len(rows)), longest + 2)}
        with EngineHarness(spec(path, **own | room), drafter=drafter_for(features)) as engine:
            assert_same(run(engine, rows), expected)
            assert engine.gauges.preemptions > 0


@pytest.mark.parametrize(
    "case",
    [
        ("adapters", "kv_bits", "head"),
        *scaled([("adapters", "experts on disk", "kv_bits"), ("adapters", "EAGLE-3")], []),
    ],
    ids="+".join,
)
def test_prompts_fused_into_steps_of_rows_with_all_of_these_change_no_token(
    case: tuple[str, ...], models: Models
) -> None:
    features = frozenset(case)
    own = settings(features, models, model_of(features))
    loaded = load_checked(spec(path_of(features, models), **own), lambda *_: None)
    make_drafter = drafter_for(features)
    drafter = make_drafter(loaded) if make_drafter is not None else None
    # A row comes every third tick, and its chunks go through the weights with the tokens of rows that generate.
    fused, packed = generated(loaded, [each.request for each in asked(features)], chunk=8, drafter=drafter)
    assert packed > 0
    assert bool(drafted(drafter)) is (drafter is not None)
    assert [fused[rid] for rid in range(len(ROWS))] == [result.ids for result in alone(features, models)]


def test_a_sparse_prefill_with_a_drafter_that_is_no_language_model_is_refused(models: Models) -> None:
    for kind in ("EAGLE-3", "block"):
        wanted = settings(frozenset({"sparse prefill", kind}), models, "dense")
        with pytest.raises(LoadFailed, match="it takes a draft model, which chooses the tokens"):
            load_checked(spec(models.folder("dense"), **wanted), lambda *_: None)


def test_a_model_with_towers_is_not_repacked(models: Models, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a model with image, video or audio towers cannot be repacked"):
        repack(models.folder("images"), tmp_path / "out", trust_remote_code=False, progress=lambda _text: None)


def test_the_documentation_has_the_verdict_on_each_pair_and_each_has_its_test() -> None:
    held = {frozenset(pair) for case in CASES for pair in itertools.combinations(case, 2)}
    cells: dict[frozenset[str], str] = dict.fromkeys(held, "yes")
    named: dict[str, str] = {}
    for pair, test in ELSEWHERE.items():
        assert frozenset(pair) not in held, "it is tested twice"
        cells[frozenset(pair)], named[test] = "yes", "yes"
    for pair, test in NOT_IN_ONE_REQUEST.items():
        cells[frozenset(pair)], named[test] = "not in one request ¹", "no"
    for pair, (note, test) in REFUSED.items():
        assert frozenset(pair) not in held
        cells[frozenset(pair)], named[test] = f"no {'¹²³⁴⁵'[note - 1]}", "no"
    sources = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert [test for test in named if f"def {test}(" not in sources] == []
    lines = [f"| | {' | '.join(FEATURES[column] for column in COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row, name in FEATURES.items():
        own = ["" if row == column else cells[frozenset({row, column})] for column in COLUMNS]
        lines.append(f"| {name} | {' | '.join(own)} |")
    table = "\n".join(lines)
    assert table in (ROOT / "docs" / "combinations.md").read_text(), table
