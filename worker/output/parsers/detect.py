"""Detection of a model's family, and of prompts that leave the reasoning open."""

import re
from collections.abc import Container, Iterator
from typing import Final

from protocol.chat_templates import ChatTemplates
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES, resolve

# Each row is a family and words of its chat templates; the first row whose words all occur in the template applies.
_TEMPLATES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("muse", ("<atem:function_calls>",)),
    ("step3", ("<steptml:invoke",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("dots", ("<dots_function_call>",)),
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("seed_oss", ("seed:tool_call",)),
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_r1", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("solar_open", ("<|tool_call:begin|>",)),
    ("hy_v3", ("tool_sep", "arg_key")),
    ("ling3", ("<arg_key>", "<role>")),
    ("spark", ("<arg_key>", "<|Bot|>")),
    ("glm45", ("<arg_key>", "<|assistant|>\\n<think></think>")),
    ("glm47", ("<arg_key>",)),
    ("minicpm5", ('<function name="', '<param name="')),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("functionary_v31", ("<function=", "<|python_tag|>")),
    ("functionary_v31", ("start_tag", "end_tag", "parameters")),
    ("functionary_v32", (">>>", "recipient")),
    ("functionary_v32", ("'>>>' +",)),
    ("nemotron_v2", ("<TOOLCALL>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_v3", ("[TOOL_CALLS]",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("command_a", ("<|START_ACTION|>", "<|START_TEXT|>")),
    ("command_r7b", ("<|START_ACTION|>",)),
    ("command_r", ("Action:", "tool_name")),
    ("phi4mini", ("functools[",)),
    ("phi4mini", ("<|tool|>", "<|/tool|>")),
    ("gigachat", ("<|role_sep|>",)),
    ("apriel16", ("[BEGIN FINAL RESPONSE]", "Here are my reasoning steps")),
    ("apriel", ("<tool_calls>", "<thinking>")),
    ("internlm2", ("<|action_start|>",)),
    ("lfm2_pythonic", ("<|tool_list_start|>",)),
    ("lfm2_pythonic", ("<|tool_call_start|>",)),
    ("lfm2_pythonic", ("List of tools: ", "<|im_start|>", "tool")),
    ("olmo3_pythonic", ("<function_calls>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama4_pythonic", ("<|header_start|>",)),
    ("llama3_json", ("<|start_header_id|>", "ipython")),
    ("granite_20b_fc", ("<function_call>",)),
    ("granite3", ("<|tool_call|>", "thought process")),
    ("granite", ("<|start_of_role|>",)),
    ("hunyuan_a13b", ("<tool_calls>", "<answer>")),
    ("minimax_m1", ("<tool_calls>", "<beginning_of_sentence>")),
    ("jamba", ("<tool_calls>",)),
    ("ernie45", ("<tool_call>", "<response>")),
    ("hermes", ("<tool_call>",)),
    ("think", ("</think>",)),
)
_VOCABULARY: Final = (
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    ("kimi_k3", ("<|open|>", "<|close|>", "<|sep|>")),
    ("harmony", ("<|channel|>", "<|constrain|>")),
    ("lfm2_pythonic", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_v3", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>", "</tool_call>")),
    ("think", ("<think>", "</think>")),
)
_MODEL_TYPES: Final = {
    "gpt_oss": "harmony", "deepseek_v32": "deepseek_v32", "deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2",
    "glm4_moe": "glm45", "minimax_m2": "minimax_m2", "seed_oss": "seed_oss", "gemma4": "gemma4", "llama4": "llama4",
    "dots3": "dots", "dots3_note": "dots", "lfm2": "lfm2", "lfm2_moe": "lfm2", "longcat_flash": "longcat",
    "step3p5": "step3p5", "apertus": "apertus", "hunyuan": "hunyuan_a13b", "cohere2": "command_r7b",
    "internlm2": "internlm2", "qwen3_next": "hermes",
}  # fmt: skip
# Families that write the same markup with different conventions.
_SIBLINGS: Final = {
    ("qwen3_coder", "step3p5"): "step3p5",
    ("qwen3_coder", "nemotron_h"): "nemotron_v3",
    ("glm47", "glm4_moe"): "glm45",
}


def detect_family(templates: ChatTemplates, vocab: Container[str], model_type: str) -> str:
    """Detect the family of a model from its templates, else from its type, else from its special tokens."""
    for template in templates.texts:
        for family, words in _TEMPLATES:
            if all(word in template for word in words):
                return _SIBLINGS.get((family, model_type), family)
    if model_type in _MODEL_TYPES:
        return resolve(_MODEL_TYPES[model_type])
    return next(vocabulary_families(vocab), "none")


def vocabulary_families(vocab: Container[str]) -> Iterator[str]:
    """Yield the families whose special tokens a vocabulary has."""
    return (family for family, words in _VOCABULARY if all(word in vocab for word in words))


def reasoning_end(family: str) -> str:
    """Return the markup that ends reasoning, written when a thinking budget is used up; "" if there is none."""
    grammar = FAMILIES[resolve(family)].grammar
    if isinstance(grammar, Channels):
        return grammar.reasoning_end
    return grammar.think.ends[0] if grammar.think else ""


# A turn marker after a reasoning marker shows that a message only quoted the reasoning marker.
_TURN: Final = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>|</?role>|<\|?turn\|?>")


def start_in_reasoning(family: str, rendered_prompt: str) -> bool:
    """Return whether the prompt leaves the reasoning open: in the last turn, the last start of reasoning comes after
    the last end.
    """
    grammar = FAMILIES[resolve(family)].grammar
    if isinstance(grammar, Channels):
        return rendered_prompt.endswith("<|channel|>analysis<|message|>")
    if grammar.think is None:
        return False
    starts = [(rendered_prompt.rfind(word), len(word)) for word in grammar.think.starts]
    at, size = max(starts)
    last_end = max(rendered_prompt.rfind(word) for word in grammar.think.ends)
    return at > last_end and not _TURN.search(rendered_prompt, at + size)
