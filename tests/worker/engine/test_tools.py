"""Tool calls that random models are made to write: forced, bounded, behind reasoning, one at a time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from protocol.from_worker import DeltaKind, Finish
from protocol.to_worker import ChatPrompt, Generate, Sampling
from tests.support.calls import TOOLS, check, markers
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import build
from tests.support.scale import scaled
from tests.worker.output.parsers.replay import is_json
from worker.output.parsers.events import Event

THINKING = r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""
PLAIN = THINKING.replace("<think>\\n", "")
MESSAGES = [{"role": "user", "content": "kato mira sen"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(tmp_path_factory.mktemp("plain"), PLAIN, layers=1)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _built(tmp_path_factory.mktemp("thinking"), THINKING, layers=scaled(4, 2))


def _built(path: Path, template: str, layers: int) -> Path:
    folder = build("qwen3", path, markers=markers(), num_hidden_layers=layers)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def chat(rid: int, temperature: float = 0.0, max_tokens: int | None = 500, **prompt: Any) -> Generate:
    asked = ChatPrompt(MESSAGES, TOOLS, **{"must_call": True, **prompt})
    return Generate(rid, asked, Sampling(temperature=temperature, seed=rid), max_tokens=max_tokens)


def calls(result: Result) -> list[tuple[str, str]]:
    names = [delta.tool.name for delta in result.deltas if delta.kind is DeltaKind.TOOL_BEGIN and delta.tool]
    arguments = ["" for _ in names]
    for delta in result.deltas:
        if delta.kind is DeltaKind.TOOL_ARGS and delta.tool:
            arguments[delta.tool.index] += delta.text
    return list(zip(names, arguments, strict=True))


def assert_called(results: Sequence[Result]) -> None:
    for result in results:
        assert result.finish is Finish.TOOL_CALLS, result.failure
        check(calls(result))
        assert not any(text.strip() for kind, text in result.events if kind is DeltaKind.TEXT)


@pytest.mark.parametrize(
    "family",
    scaled(
        ["hermes", "qwen3_coder", "glm45", "gemma4", "harmony", "llama3_json", "lfm2_pythonic", "kimi_k3", "mistral",
         "deepseek_v3", "minimax_m3"],
        ["hermes"],
    ),
)  # fmt: skip
def test_a_random_model_calls_when_it_must_greedy_and_hot(family: str, folder: Path) -> None:
    with EngineHarness(spec(folder, parser=family)) as engine:
        assert_called(engine.run([chat(1), chat(2, 1.0), chat(3, 2.0), chat(4, 1.0, one_call=True)]))
        (named,) = engine.run([chat(5, 1.0, callable_tools=("now",), one_call=True)])
    assert calls(named) == [("now", "{}")]


@pytest.mark.soak
@pytest.mark.parametrize("family", ["hermes", *scaled(["qwen3_coder", "granite"], [])])
def test_reasoning_that_never_ends_leaves_room_for_the_call(family: str, thinker: Path) -> None:
    with EngineHarness(spec(thinker, parser=family)) as engine:
        results = engine.run([chat(1), chat(2, 1.0)])
        (bounded,) = engine.run([chat(3, 1.0, callable_tools=("now",))])
    assert_called([*results, bounded])
    for result in results:
        assert any(kind is DeltaKind.REASONING for kind, _ in result.events)
        assert result.usage is not None
        assert 0 < result.usage.reasoning <= 250 + 4


def test_the_answer_ends_after_its_first_call_where_only_one_is_wanted(folder: Path) -> None:
    both = "".join(f'<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>{gap}' for gap in ("\n", ""))
    with EngineHarness(spec(folder, parser="hermes")) as engine:
        engine_calls = [chat(rid, must_call=False, one_call=one) for rid, one in ((1, False), (2, True))]
        rows = [engine.intake.row(request, 0.0) for request in engine_calls]
        ids = engine.loaded.tokenizer.encode(both, add_special_tokens=False)
        seen: list[list[DeltaKind]] = []
        for row in rows:
            pieces = []
            for token in ids:
                pieces.append(engine.intake.writer.advance(row, token, None, None))
                if pieces[-1].finish is not None:
                    break
            seen.append([event.kind for piece in pieces for event in piece.events])
            assert pieces[-1].finish is (Finish.TOOL_CALLS if row.text.is_one_call else None)
    assert [kinds.count(DeltaKind.TOOL_BEGIN) for kinds in seen] == [2, 1]


@pytest.mark.parametrize("stop", ["}", '"', "</tool_call>", "{"])
def test_no_stop_string_cuts_a_forced_call(folder: Path, stop: str) -> None:
    with EngineHarness(spec(folder, parser="hermes")) as engine:
        plain, stopped = engine.run([chat(1), structs.replace(chat(1), rid=2, stop=(stop,))])
    assert_called([plain, stopped])
    assert stopped.ids == plain.ids


@pytest.mark.parametrize(("stop", "is_cut"), [("}", True), ("b", True), ("</tool_call>", False)])
def test_a_call_that_a_stop_string_cuts_is_reported_as_cut(folder: Path, stop: str, is_cut: bool) -> None:
    text = '<tool_call>\n{"name": "set-it", "arguments": {"on": true, "b": 1}}\n</tool_call>'
    with EngineHarness(spec(folder, parser="hermes")) as engine:
        row = engine.intake.row(structs.replace(chat(1, must_call=False), stop=(stop,)), 0.0)
        events: list[Event] = []
        finish = None
        for token in engine.loaded.tokenizer.encode(text, add_special_tokens=False):
            if finish is None:
                piece = engine.intake.writer.advance(row, token, None, None)
                events, finish = events + piece.events, piece.finish
    assert finish is (Finish.LENGTH if is_cut else Finish.TOOL_CALLS)
    assert row.text.parser is not None
    assert row.text.parser.malformed == is_cut
    arguments = "".join(event.text for event in events if event.kind is DeltaKind.TOOL_ARGS)
    assert is_json(arguments) != is_cut


def test_a_forced_call_goes_on_where_another_worker_left_it(folder: Path) -> None:
    with EngineHarness(spec(folder, parser="qwen3_coder")) as engine:
        (whole,) = engine.run([chat(1, 1.0)])
        assert_called([whole])
        for count in (3, len(whole.ids) // 2, len(whole.ids) - 2):
            request = chat(1, 1.0)
            resumed = Generate(rid=100 + count, prompt=request.prompt, sampling=request.sampling,
                               max_tokens=500, resume=tuple(whole.ids[:count]))  # fmt: skip
            (rest,) = engine.run([resumed])
            assert [*whole.ids[:count], *rest.ids] == whole.ids


def test_a_template_without_tools_gets_them_in_a_form_that_is_read_back(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path, num_hidden_layers=1)
    with EngineHarness(spec(folder, parser="none")) as engine:
        (result,) = engine.run([chat(1)])
    assert_called([result])
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls(result))
