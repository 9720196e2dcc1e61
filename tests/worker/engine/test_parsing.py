"""Reasoning and tool calls as the engine sends them, on random models whose templates open a reasoning block."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from protocol.failures import Code
from protocol.from_worker import DeltaKind, Finish
from protocol.to_worker import ChatPrompt, Generate, Sampling
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB, build

THINKING_TEMPLATE = r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build("qwen3", tmp_path_factory.mktemp("thinking"))
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    return folder


def chat(rid: int, **fields: object) -> Generate:
    prompt = ChatPrompt([{"role": "user", "content": "kato mira sen"}])
    return structs.replace(Generate(rid, prompt, Sampling(temperature=0.0, ignore_eos=True), max_tokens=24), **fields)


def test_text_before_the_end_of_a_block_the_prompt_opened_is_reasoning(thinking_model: Path) -> None:
    with EngineHarness(spec(thinking_model)) as engine:
        (result,) = engine.run([chat(1)])
    assert {kind for kind, _ in result.events} == {DeltaKind.REASONING}
    assert result.usage is not None
    assert result.usage.reasoning == 24


def test_a_used_up_thinking_budget_closes_the_block_and_an_answer_follows(thinking_model: Path) -> None:
    with EngineHarness(spec(thinking_model)) as engine:
        (result,) = engine.run([chat(1, thinking_budget=8)])
        closing = engine.intake.vocabulary.decode(result.ids[8:11])
    kinds = [kind for kind, _ in result.events]
    assert kinds == sorted(kinds, reverse=True), "reasoning first, then text"
    assert set(kinds) == {DeltaKind.REASONING, DeltaKind.TEXT}
    assert "</think>" in closing
    assert "</think>" not in "".join(text for _, text in result.events)
    assert result.finish is Finish.LENGTH
    assert len(result.ids) == 24


def test_a_row_whose_block_cannot_be_closed_fails_alone(thinking_model: Path) -> None:
    with EngineHarness(spec(thinking_model)) as engine:
        row = engine.intake.row(chat(1, thinking_budget=4), 0.0)
        add, closing = row.text.detokenizer.add, set(row.thinking.closing_ids)

        class Torn:
            def add(self, token: int) -> str:
                if token in closing:
                    raise ValueError("torn")
                return add(token)

            def finish(self) -> str:
                return ""

        row.text.detokenizer = Torn()
        bad, healthy = engine.submit_row(row), engine.submit(chat(2))
        engine.wait(lambda: bad.terminals and healthy.terminals)
        assert engine.error is None
    assert bad.failure is not None
    assert bad.failure.code is Code.ROW_FAILED
    assert healthy.finish is Finish.LENGTH


def test_an_end_that_the_model_cannot_read_is_never_written(tmp_path: Path) -> None:
    """Some tokenizers have more ids than their model: MLX would read beyond the end of its embeddings."""
    folder = build("qwen3", tmp_path, markers=["</longcat_think>"], vocab_size=VOCAB)
    (folder / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    with EngineHarness(spec(folder, parser="longcat")) as engine:
        (result,) = engine.run([chat(1, thinking_budget=4)])
    assert result.finish is Finish.LENGTH
    assert max(result.ids) < VOCAB


def test_a_budget_is_exact_in_a_batch_and_after_a_resume(thinking_model: Path) -> None:
    with EngineHarness(spec(thinking_model)) as engine:
        (alone,) = engine.run([chat(1, thinking_budget=8)])
        for result in engine.run([chat(rid, thinking_budget=8) for rid in range(2, 6)]):
            assert result.ids == alone.ids
        for count, text in alone.steps[:-1]:
            (rest,) = engine.run([chat(100 + count, thinking_budget=8, resume=tuple(alone.ids[:count]))])
            assert alone.ids[:count] + rest.ids == alone.ids
            assert text + rest.text == alone.text


def test_a_budget_larger_than_max_tokens_changes_nothing(thinking_model: Path) -> None:
    with EngineHarness(spec(thinking_model)) as engine:
        free, bound = engine.run([chat(1), chat(2, thinking_budget=1000)])
    assert free.ids == bound.ids


def test_a_block_that_the_template_opens_in_any_case_is_closed_at_once_when_none_is_wanted(
    thinking_model: Path,
) -> None:
    prompt = ChatPrompt([{"role": "user", "content": "kato mira sen"}], thinking=False)
    with EngineHarness(spec(thinking_model)) as engine:
        (result,) = engine.run([chat(1, prompt=prompt)])
        assert engine.intake.vocabulary.decode(result.ids).startswith("\n</think>\n\n")
    assert {kind for kind, _ in result.events} == {DeltaKind.TEXT}


HARMONY_TEMPLATE = r"""
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for m in messages %}{{- '<|start|>' + m.role + '<|message|>' + (m.content or '') + '<|end|>' }}{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def test_a_model_of_channels_that_is_not_to_think_thinks_least_and_goes_on_to_its_answer(tmp_path: Path) -> None:
    markers = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"]
    folder = build("gpt_oss", tmp_path, markers=markers)
    (folder / "chat_template.jinja").write_text(HARMONY_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    messages = [{"role": "user", "content": "kato"}]
    with EngineHarness(spec(folder, parser="harmony")) as engine:
        rows = [
            engine.intake.row(Generate(1, ChatPrompt(messages, *more, thinking=thinking), Sampling()), 0.0)
            for more, thinking in (((), None), ((), False), ((tools,), False))
        ]
        prompts = [engine.intake.vocabulary.decode(row.prompt) for row in rows]
        opening = engine.loaded.tokenizer.encode("<|channel|>analysis<|message|>", add_special_tokens=False)
        for row in rows:
            for token in opening:
                engine.intake.writer.advance(row, token, None, None)
    assert ["Reasoning: low" in prompt for prompt in prompts] == [False, True, True]
    # Beside tools the next message may be a call as well as an answer.
    assert [row.thinking.is_enough for row in rows] == [False, True, False]


def test_a_completion_has_no_parser(model_folder: Callable[[str], Path]) -> None:
    from protocol.to_worker import TextPrompt

    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        (result,) = engine.run([Generate(1, TextPrompt("<think>kato"), Sampling(temperature=0.0), max_tokens=12)])
    assert {kind for kind, _ in result.events} == {DeltaKind.TEXT}
