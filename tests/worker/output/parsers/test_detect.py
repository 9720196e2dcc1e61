"""The family of a model is seen from its template, its vocabulary or its type."""

import pytest

from protocol.checkpoint import ChatTemplates
from worker.output.parsers.families import ALIASES, FAMILIES, UnknownFamily, detect_family, resolve, start_in_reasoning

TEMPLATES = {
    '<tool_call>\n{"name": "\' + tool_call.name': "hermes",
    "<tool_call>\n<function=' + tool.name + '>\n<parameter=": "qwen3_coder",
    "<tool_call>' + name + '<arg_key>": "glm47",
    "<minimax:tool_call>\n<invoke name=": "minimax_m2",
    "<|start|>assistant<|channel|>analysis<|message|>": "harmony",
    "<|tool_call>call:' + name + '{' + args + '}<tool_call|>": "gemma4",
    "[TOOL_CALLS]' + name + '[ARGS]": "mistral",
    "[TOOL_CALLS] [{": "mistral_v3",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name": "deepseek_v31",
    '<｜tool_calls_begin｜><steptml:invoke name="': "step3",
    "<seed:tool_call>\n<function=f>\n<parameter=p>": "seed_oss",
    "<|start_header_id|>ipython<|end_header_id|>": "llama3_json",
    "{{ '<think>' + reasoning + '</think>' }}": "think",
    "{{ message.content }}": "none",
}


@pytest.mark.parametrize(("template", "family"), TEMPLATES.items(), ids=TEMPLATES.values())
def test_a_template_names_its_family(template: str, family: str) -> None:
    assert detect_family(ChatTemplates.of(template), frozenset(), "") == family


def test_the_template_for_tools_names_the_family_before_the_default_one() -> None:
    named = {"default": "{{ '</think>' }}", "tool_use": "Action: tool_name", "rag": "<minimax:tool_call>"}
    assert detect_family(ChatTemplates.of(named), frozenset(), "") == "command_r"
    assert detect_family(ChatTemplates.of({**named, "tool_use": "tools"}), frozenset(), "") == "think"


def test_special_tokens_tell_where_the_template_does_not() -> None:
    assert detect_family(ChatTemplates(), {"<|tool_call_start|>", "<|tool_call_end|>"}, "") == "lfm2_pythonic"
    assert detect_family(ChatTemplates(), frozenset(), "gpt_oss") == "harmony"
    assert detect_family(ChatTemplates(), frozenset(), "") == "none"


def test_siblings_with_the_same_markup_are_told_by_the_model_type() -> None:
    template = "<tool_call>\n<function=f>\n<parameter=p>"
    assert detect_family(ChatTemplates.of(template), frozenset(), "step3p5") == "step3p5"


@pytest.mark.parametrize(("alias", "family"), ALIASES.items())
def test_every_alias_names_a_family(alias: str, family: str) -> None:
    assert family in FAMILIES
    assert resolve(alias.upper().replace("_", "-")) == family


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownFamily, match="hermes"):
        resolve("nothing-like-it")


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<think>old</think>x<|im_end|>\n<|im_start|>assistant\n<think>\nI am in the middle", True),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_the_rendered_prompt_tells_whether_reasoning_is_open(prompt: str, is_open: bool) -> None:
    assert start_in_reasoning("hermes", prompt) is is_open
