"""A model divided among processes generates what it generates in one, whatever happens to its rows."""

from array import array
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from protocol.to_worker import (
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Generate,
    LabelledQuestion,
    Sampling,
    TextPrompt,
    TokensPrompt,
)
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import ARCHITECTURES, build
from tests.support.ranks import RunningGroup, group_spec
from tests.support.scale import scaled

TEMPLATE = r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SETTINGS = {"prefill_chunk": 64, "speculate": "off"}
CASES = [
    ("qwen3", "tensor"),
    *scaled(
        [
            ("qwen3_moe", "pipeline"),
            ("qwen3_5", "pipeline"),
            ("qwen3_5", "tensor"),
            ("qwen2", "tensor"),
            ("qwen2", "pipeline"),
            ("qwen3_moe", "tensor"),
            ("gpt_oss", "tensor"),
        ],
        [],
    ),
]


def requests() -> list[Generate]:
    """One of each kind of request, with prompts of several chunks that have a beginning in common."""
    shared = "ka to mi ra sen lu por vi " * 12
    seeded = Sampling(temperature=0.9, top_p=0.95, top_k=40, seed=5, ignore_eos=True)
    penal = Sampling(1.1, 1.0, 0, 0.05, 1.2, 0.3, 0.2, {30: -5.0}, seed=6, ignore_eos=True)
    choices = [Generate(10 + n, TextPrompt(shared + "an"), structs.replace(seeded, seed=n), 8) for n in range(4)]
    question = ChatPrompt([{"role": "user", "content": "kato mira sen"}])
    return [
        Generate(1, TextPrompt(shared), GREEDY, 12),
        Generate(2, TextPrompt(shared + "de an"), seeded, 12, top_logprobs=3),
        Generate(3, TextPrompt("mi ra"), penal, 12),
        Generate(4, TextPrompt(shared + "ka"), structs.replace(seeded, ignore_eos=False), 20,
                 constraint=Constraint(ConstraintKind.REGEX, "[a-z ]+")),
        Generate(5, question, GREEDY, 16, thinking_budget=8),
        Generate(6, TextPrompt("lu por"), GREEDY, 4, echo=True, top_logprobs=2),
        Generate(7, TextPrompt("vi de"), GREEDY, 12, stop=("ka", "r")),
        Generate(8, ChatPrompt([{"role": "user", "content": shared}]), GREEDY, 0, questions=(
            LabelledQuestion("ka?", ("Yes", "No")), LabelledQuestion("mi?", ("alpha one", "alpha two")))),
        *choices,
    ]  # fmt: skip


def crowd() -> list[Generate]:
    """Rows that grow past what admission counts on; most of their output is given to them."""
    made: list[Generate] = []
    for rid in range(3):
        ids = tuple(20 + (rid * 31 + at * 7) % 400 for at in range(490))
        sampling = Sampling(temperature=0.8 if rid else 0.0, seed=rid, ignore_eos=True)
        made.append(Generate(20 + rid, TokensPrompt(ids[:240]), sampling, 290, resume=ids[240:]))
    return made


def two_layers(architecture: str) -> dict[str, Any]:
    """Settings of a model with one layer for each rank of a pipeline: of a hybrid one has only recurrent state."""
    text = {**ARCHITECTURES.get(architecture, (None, {}))[1].get("text_config", {}), "num_hidden_layers": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if architecture == "gpt_oss" else {}
    return {"num_hidden_layers": 2, "text_config": text} if "model_type" in text else {"num_hidden_layers": 2, **kinds}


def content(results: list[Result]) -> list[object]:
    return [(each.text, each.ids, each.finish, each.failure) for each in results]


def answers(result: Result) -> list[float]:
    """Log-probabilities of the labels of a request's questions."""
    return array("f", b"".join(delta.data for delta in result.deltas)).tolist()


def again(requests: list[Generate], offset: int) -> list[Generate]:
    return [structs.replace(request, rid=request.rid + offset) for request in requests]


@pytest.mark.soak
@pytest.mark.parametrize(("architecture", "parallel"), CASES)
def test_a_group_generates_what_one_process_does(
    architecture: str, parallel: str, tmp_path: Path, run_dir: Path
) -> None:
    folder = build(architecture, tmp_path / "model", **two_layers(architecture))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with EngineHarness(spec(folder, cache_bytes=0, **SETTINGS)) as engine:
        expected = [engine.run([request])[0] for request in requests()]
        grown = [engine.run([request])[0] for request in crowd()]
        cost = engine.kv_cost
    # Memory for KV that the crowd outgrows. Each rank has half of it, and half of the KV, or of a hybrid one has all.
    kv_bytes = cost.bytes(3, 512) * (2 if (architecture, parallel) == ("qwen3_5", "pipeline") else 1) + 2
    settings = {**SETTINGS, "cache_bytes": 1 << 24, "kv_bytes": kv_bytes}
    with RunningGroup(run_dir, group_spec(folder, parallel, **settings)) as group:
        ready = group.ready_group()
        assert ready.group is not None
        assert [rank.rank for rank in ready.group.ranks] == [0, 1]
        first = group.run(requests())
        assert content(first) == content(expected)
        warm = group.run(again(requests(), 100))
        assert content(warm) == content(expected)
        assert warm[1].usage is not None
        assert warm[1].usage.cached > 90, "of the first run"
        for result, other in zip(warm, expected, strict=True):
            ours, theirs = ([each.logprob for each in one.logprobs] for one in (result, other))
            assert ours == pytest.approx(theirs, abs=1e-4, nan_ok=True)
            assert answers(result) == pytest.approx(answers(other), abs=1e-4)
        assert content(group.run(crowd())) == content(grown)
        assert group.pong(1).stats.preemptions > 0
        assert len(group.pong(2).stats.ranks) == 2
        assert group.stop() == [0, 0]
