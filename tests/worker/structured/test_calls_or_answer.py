"""A format of the answer beside tools: the model may still call, and both are held to what was asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.failures import Code
from protocol.from_worker import DeltaKind, Finish
from protocol.to_worker import ChatPrompt, Constraint, ConstraintKind, Generate, Sampling
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import build
from tests.worker.engine.test_tools import PLAIN, calls
from worker.structured.tool_grammar.build import HEADS

KIND = ConstraintKind
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}},
    "required": ["answer"],
    "additionalProperties": False,
}
SCHEMA = Constraint(KIND.JSON_SCHEMA, json.dumps(ANSWER), after_reasoning=True)


def ask(rid: int, text: str, constraint: Constraint = SCHEMA, temperature: float = 0.0, **prompt: Any) -> Generate:
    asked = ChatPrompt([{"role": "user", "content": text}], [WEATHER], **prompt)
    return Generate(rid, asked, Sampling(temperature=temperature, seed=rid), max_tokens=100, constraint=constraint)


@pytest.fixture(scope="module")
def demo() -> Iterator[EngineHarness]:
    with EngineHarness(spec(Path("demo"))) as engine:
        yield engine


def test_a_model_that_has_to_call_calls_and_one_that_knows_the_answer_answers(demo: EngineHarness) -> None:
    weather, capital = demo.run([ask(1, "What is the weather in Paris?"), ask(2, "What is the capital of France?")])
    assert weather.finish is Finish.TOOL_CALLS
    assert [(name, json.loads(arguments)) for name, arguments in calls(weather)] == [("get_weather", {"city": "Paris"})]
    assert not any(kind is DeltaKind.TEXT for kind, _ in weather.events)
    assert capital.finish is Finish.STOP
    assert list(json.loads(capital.text)) == ["answer"]


@pytest.mark.parametrize(
    ("constraint", "fits"),
    [
        (Constraint(KIND.JSON_OBJECT, after_reasoning=True), lambda text: isinstance(json.loads(text), dict)),
        pytest.param(
            Constraint(KIND.REGEX, "no{1,3}", after_reasoning=True),
            lambda text: text in ("no", "noo", "nooo"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            Constraint(KIND.CHOICE, '["yes", "no"]', after_reasoning=True),
            lambda text: text in ("yes", "no"),
            marks=pytest.mark.soak,
        ),
        (Constraint(KIND.GRAMMAR, 'start: "it is " x\nx: "so"', after_reasoning=True), lambda text: text == "it is so"),
    ],
    ids=lambda value: value.kind.name if isinstance(value, Constraint) else "",
)
def test_every_kind_of_format_leaves_calls_open(demo: EngineHarness, constraint: Constraint, fits: Any) -> None:
    called, *hot = demo.run(
        [ask(1, "What is the weather in Paris?", constraint)]
        + [ask(2 + seed, "Say what you like.", constraint, 2.0) for seed in range(2)]
    )
    assert calls(called) == [("get_weather", '{"city": "Paris"}')]
    for result in hot:
        holds(result, fits)


def holds(result: Result, fits: Any) -> None:
    """Either calls whose arguments fit, or an answer that does; unless the tokens have run out."""
    if result.finish is Finish.TOOL_CALLS:
        assert all(set(json.loads(arguments)) == {"city"} for _, arguments in calls(result))
        assert result.text.strip() == "".join(arguments for _, arguments in calls(result))
    elif result.finish is Finish.STOP:
        assert fits(result.text)
    else:
        assert result.finish is Finish.LENGTH


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "llama3_json", "mistral", "harmony", "pythonic"])
def test_whatever_a_random_model_says_is_a_call_or_an_answer(family: str, tmp_path: Path) -> None:
    markers = ["<tool_call>", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|call|>"]
    folder = build("qwen3", tmp_path, markers=markers[1:], num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(PLAIN)
    with EngineHarness(spec(folder, parser=family)) as engine:
        rows = [engine.intake.row(ask(rid, "kato"), 0.0) for rid in range(2)]
        for row in rows:
            engine.intake.rules.restrict(row, ask(row.rid, "kato"))
        rules = [row.rule for row in rows]
        results = engine.run([ask(10 + seed, "kato", temperature=1.0) for seed in range(3)])
    assert rules[0] is not None
    assert bool(rules[0].by_marker) == (family in HEADS and family == "harmony")
    for result in results:
        holds(result, lambda text: list(json.loads(text)) == ["answer"])


def test_a_schema_that_cannot_be_held_is_refused_beside_tools_too(demo: EngineHarness) -> None:
    (refused,) = demo.run([ask(1, "hi", Constraint(KIND.JSON_SCHEMA, '{"uniqueItems": true}', after_reasoning=True))])
    assert refused.failure is not None
    assert (refused.failure.code, refused.failure.param) == (Code.INVALID_REQUEST, "response_format")
