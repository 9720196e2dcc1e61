"""Table of all known model families: their markup and their aliases.

Detection of a model's family, and of prompts that leave the reasoning open.
"""

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Final

from protocol.checkpoint import ChatTemplates
from worker.output.parsers.call import FENCE, CallFormat
from worker.output.parsers.channels import HARMONY, Channels
from worker.output.parsers.json_calls import (
    JsonCalls,
    LlamaCalls,
    MistralCalls,
    RecipientJson,
    SectionCalls,
    TaggedJson,
)
from worker.output.parsers.literal import FUNCTION_GEMMA, GEMMA
from worker.output.parsers.literal_calls import GemmaCalls, PythonCalls
from worker.output.parsers.think_and_calls import MarkupGrammar, Think, Verbatim
from worker.output.parsers.xml_calls import MiniMaxM3Calls, XmlCalls


@dataclass(frozen=True, slots=True)
class ParserFamily:
    """Parser settings of one family. `opens` means that its templates open the reasoning, so outputs begin inside it by
    default.

    `undeclared` is the grammar for requests without tools, if it differs. For the other fields see `ParsedOutput`.
    """

    grammar: MarkupGrammar | Channels
    opens: bool = False
    keep_gap: bool = False
    trim_before_tool: bool = False
    undeclared: MarkupGrammar | None = None


_THINK = Think(("<think>",), ("</think>",))

_HERMES = JsonCalls(("<tool_call>",), ("</tool_call>",))
_QWEN_XML = XmlCalls(
    wrap=("<tool_call>",), wrap_end=("</tool_call>",), call="<function=", head_end=(">",),
    param="<parameter=", key_end=">", param_end="</parameter>", call_end="</function>", json=True,
)  # fmt: skip
_SEED = XmlCalls(
    strip_line=False,
    wrap=("<seed:tool_call>",), wrap_end=("</seed:tool_call>",), call="<function=", head_end=(">",),
    param="<parameter=", key_end=">", param_end="</parameter>", call_end="</function>",
)  # fmt: skip
_GLM = XmlCalls(
    wrap=("<tool_call>",), wrap_end=(), call="", head_end=("\n", "<arg_key>", "</tool_call>", "{"),
    param="<arg_key>", key_end="</arg_key>", value="<arg_value>", param_end="</arg_value>", call_end="</tool_call>",
    strip_line=False, json=True,
)  # fmt: skip
_LONGCAT = XmlCalls(
    wrap=("<longcat_tool_call>",), wrap_end=(), call="",
    head_end=("\n", "<longcat_arg_key>", "</longcat_tool_call>", "{"), param="<longcat_arg_key>",
    key_end="</longcat_arg_key>", value="<longcat_arg_value>", param_end="</longcat_arg_value>",
    call_end="</longcat_tool_call>", strip_line=False, json=True,
)  # fmt: skip
_MINIMAX_M2 = XmlCalls(
    strip_line=False,
    wrap=("<minimax:tool_call>",), wrap_end=("</minimax:tool_call>",), call="<invoke", head_end=(">",),
    param="<parameter", key_end=">", param_end="</parameter>", call_end="</invoke>", call_alone=False,
)  # fmt: skip
_DOTS = XmlCalls(
    wrap=("<dots_function_call>",), wrap_end=("</dots_function_call>",), call="<invoke", head_end=(">",),
    param="<parameter", key_end=">", param_end="</parameter>", call_end="</invoke>", call_alone=False, json=True,
)  # fmt: skip
_MINICPM5 = XmlCalls(
    strip_line=False,
    wrap=(), wrap_end=(), call="<function", head_end=(">",), param="<param", key_end=">", param_end="</param>",
    call_end="</function>", cdata=True,
)  # fmt: skip
_STEP3 = XmlCalls(
    wrap=("<｜tool_calls_begin｜>",), wrap_end=("<｜tool_calls_end｜>",),
    call="<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke", head_end=(">",), param="<steptml:parameter",
    key_end=">", param_end="</steptml:parameter>", call_end="</steptml:invoke><｜tool_call_end｜>", strip_line=False,
)  # fmt: skip
_KIMI_K3 = XmlCalls(
    wrap=("<|open|>tools<|sep|>",), wrap_end=("<|close|>tools<|sep|>",), call="<|open|>call", head_end=("<|sep|>",),
    param="<|open|>argument", key_end="<|sep|>", param_end="<|close|>argument<|sep|>",
    call_end="<|close|>call<|sep|>", strip_line=False, json_block="<|open|>json", json_end="<|close|>json<|sep|>",
)  # fmt: skip
_MUSE = XmlCalls(
    wrap=("<atem:function_calls>",), wrap_end=("</atem:function_calls>",), call="<atem:invoke", head_end=(">",),
    param="<atem:parameter", key_end=">", param_end="</atem:parameter>", call_end="</atem:invoke>", strip_line=False,
)  # fmt: skip
_DSML = XmlCalls(
    wrap=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    wrap_end=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"), call="<｜DSML｜invoke", head_end=(">",),
    param="<｜DSML｜parameter", key_end=">", param_end="</｜DSML｜parameter>", call_end="</｜DSML｜invoke>",
    strip_line=False,
)  # fmt: skip


def _hy(suffix: str) -> XmlCalls:
    return XmlCalls(
        wrap=(f"<tool_calls{suffix}>",), wrap_end=(f"</tool_calls{suffix}>",), call=f"<tool_call{suffix}>",
        head_end=(f"<tool_sep{suffix}>",), param=f"<arg_key{suffix}>", key_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>", param_end=f"</arg_value{suffix}>", call_end=f"</tool_call{suffix}>",
        strip_line=False,
    )  # fmt: skip


_KIMI_K2 = SectionCalls(
    section=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"), call=("<|tool_call_begin|>",),
    separator=("<|tool_call_argument_begin|>",), call_end=("<|tool_call_end|>",),
    section_end=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
)  # fmt: skip
# The tokenizer's own spelling comes first, then those of converted vocabularies.
_DS = ("｜{}▁{}▁{}｜", "｜{}_{}_{}｜", "｜{} {} {}｜", "｜{}\\_{}\\_{}｜")
_DEEPSEEK = SectionCalls(
    section=tuple(f"<{mark.format('tool', 'calls', 'begin')}>" for mark in _DS),
    call=tuple(f"<{mark.format('tool', 'call', 'begin')}>" for mark in _DS),
    separator=("<｜tool▁sep｜>", "<｜tool_sep｜>", "<｜tool sep｜>", "<｜tool\\_sep｜>"),
    call_end=tuple(f"<{mark.format('tool', 'call', 'end')}>" for mark in _DS),
    section_end=tuple(f"<{mark.format('tool', 'calls', 'end')}>" for mark in _DS),
)
_SOLAR = SectionCalls(
    section=("<|tool_calls|>",), call=("<|tool_call:begin|>",), separator=("<|tool_call:args|>",),
    call_end=("<|tool_call:end|>",), section_end=("<|calls|>",), id_separator="<|tool_call:name|>",
)  # fmt: skip
_COHERE = JsonCalls(("<|START_ACTION|>",), ("<|END_ACTION|>",))
_COHERE_DROP = (
    "<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_OF_TURN_TOKEN|>",
    "<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
_LIST_TAG = JsonCalls(("<tool_calls>",), ("</tool_calls>",))
_GIGACHAT = JsonCalls(("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>"), ("</s>",))
_GRANITE = JsonCalls(("<|tool_call|>", "<tool_call>"), ("</tool_call>",))
_GRANITE_BARE = JsonCalls((), bare=True)
_GRANITE_THINK = Think(
    ("Here is my thought process:", "Here's my thought process:", "<think>"),
    ("Here is my response:", "Here's my response:", "</think>"),
)
# The end of the list also ends a broken call.
_PYTHON_MESSAGE = PythonCalls(ends=(")]",), bare=True)
_XLAM = JsonCalls(("[TOOL_CALLS]", "<tool_call>", FENCE, "[", "{"), ("</tool_call>",), bare=True)


def _row(
    *formats: CallFormat, think: Think | None = _THINK, keep_gap: bool = False, trim_before_tool: bool = False
) -> ParserFamily:
    return ParserFamily(MarkupGrammar(formats, think), keep_gap=keep_gap, trim_before_tool=trim_before_tool)


_DEEPSEEK_V3 = MarkupGrammar((_DEEPSEEK,), _THINK, _DEEPSEEK.ends, tool_ends_think="always")
_DEEPSEEK_V32 = MarkupGrammar((_DSML,), _THINK, tool_ends_think="always")
_MISTRAL = MarkupGrammar((MistralCalls(),), Think(("[THINK]",), ("[/THINK]",), is_explicit=True))
_QWEN_LINE = MarkupGrammar((_QWEN_XML,), _THINK, tool_ends_think="line")

FAMILIES: Final[dict[str, ParserFamily]] = {
    "none": ParserFamily(MarkupGrammar()),
    "think": ParserFamily(MarkupGrammar(think=_THINK)),
    "apertus": _row(
        JsonCalls(("<|tools_prefix|>",), ("<|tools_suffix|>",), keyed=True),
        think=Think(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
    ),
    "apriel": ParserFamily(
        MarkupGrammar(
            (_LIST_TAG,), Think(("<thinking>",), ("</thinking>",)), ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]")
        )
    ),
    "apriel16": ParserFamily(
        MarkupGrammar(
            (_LIST_TAG,),
            Think(("Here are my reasoning steps:\n",), ("[BEGIN FINAL RESPONSE]",)),
            ("[END FINAL RESPONSE]", "<|end|>"),
            tool_ends_think="line",
        ),
        opens=True,
    ),
    "command_a": ParserFamily(
        MarkupGrammar(
            (_COHERE,),
            Think(("<|START_THINKING|>",), ("<|END_THINKING|>", "<|START_TEXT|>", "<|START_RESPONSE|>")),
            _COHERE_DROP,
            tool_ends_think="always",
        ),
        opens=True,
    ),
    "command_r7b": ParserFamily(
        MarkupGrammar((_COHERE,), Think(("<|START_THINKING|>",), ("<|END_THINKING|>",)), _COHERE_DROP, None, "always")
    ),
    "command_r": _row(JsonCalls(("Action: ```json", "Action:\n```json", "Action:```json"), ("```",)), think=None),
    "deepseek_r1": ParserFamily(_DEEPSEEK_V3, opens=True, keep_gap=True),
    "deepseek_v3": ParserFamily(_DEEPSEEK_V3),
    "deepseek_v31": ParserFamily(_DEEPSEEK_V3),
    "deepseek_v32": ParserFamily(_DEEPSEEK_V32),
    "deepseek_v4": ParserFamily(_DEEPSEEK_V32),
    "dots": _row(_DOTS),
    "ernie45": ParserFamily(MarkupGrammar((_HERMES,), _THINK, ("<response>", "</response>"))),
    "functionary_v31": _row(TaggedJson(), LlamaCalls(("<|python_tag|>",)), think=None),
    "functionary_v32": ParserFamily(MarkupGrammar((RecipientJson(),), opening=RecipientJson())),
    "gemma4": ParserFamily(
        MarkupGrammar(
            (GemmaCalls(("<|tool_call>",), ("<tool_call|>",), GEMMA),),
            Think(("<|channel>",), ("<channel|>",), "thought"),
            ("<turn|>", "<|tool_response>", "<tool_call|>"),
            GemmaCalls((), ("<tool_call|>",), GEMMA, bare=True),
            tool_ends_think="always",
        )
    ),
    "function_gemma": ParserFamily(
        MarkupGrammar(
            (GemmaCalls(("<start_function_call>",), ("<end_function_call>",), FUNCTION_GEMMA),),
            drop=("<start_function_response>", "<end_of_turn>", "<end_function_call>"),
        )
    ),
    "gigachat": ParserFamily(MarkupGrammar((_GIGACHAT,), drop=("<|message_sep|>",))),
    "glm45": _row(_GLM, trim_before_tool=True),
    "glm47": _row(_GLM, trim_before_tool=True),
    "granite": ParserFamily(MarkupGrammar((_GRANITE,), _THINK, opening=_GRANITE_BARE)),
    "granite3": ParserFamily(
        MarkupGrammar((_GRANITE,), _GRANITE_THINK, ("<response>", "</response>"), opening=_GRANITE_BARE),
    ),
    "granite_20b_fc": _row(JsonCalls(("<function_call>",)), think=None),
    "granite_thinking": ParserFamily(MarkupGrammar((_GRANITE,), _THINK, opening=_GRANITE_BARE)),
    "harmony": ParserFamily(HARMONY),
    "hermes": _row(_HERMES),
    "holo2": ParserFamily(MarkupGrammar((_HERMES,), _THINK), opens=True),
    "hunyuan_a13b": ParserFamily(MarkupGrammar((_LIST_TAG,), _THINK, ("<answer>", "</answer>"))),
    "hy_v3": ParserFamily(
        MarkupGrammar(
            (_hy(""), _hy(":opensource")), Think(("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"))
        )
    ),
    "internlm2": _row(JsonCalls(("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",))),
    "jamba": _row(_LIST_TAG),
    "kimi_k2": ParserFamily(
        MarkupGrammar(
            (_KIMI_K2,),
            Think(("<think>", "◁think▷"), ("</think>", "◁/think▷")),
            _KIMI_K2.section_end,
            tool_ends_think="always",
        )
    ),
    "kimi_k3": ParserFamily(
        MarkupGrammar(
            (_KIMI_K3,),
            Think(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>", "<|open|>response<|sep|>")),
            ("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|close|>tools<|sep|>", "<|end_of_msg|>"),
            tool_ends_think="always",
        )
    ),
    "lfm2_pythonic": _row(PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",))),
    "ling3": ParserFamily(MarkupGrammar((_GLM,), _THINK, ("<|role_end|>",))),
    "llama3_json": _row(LlamaCalls(), think=None),
    "llama4_pythonic": ParserFamily(
        MarkupGrammar(
            (PythonCalls(("<|python_start|>",), ("<|python_end|>",)), LlamaCalls(("<|python_tag|>",))),
            opening=_PYTHON_MESSAGE,
        )
    ),
    "longcat": ParserFamily(
        MarkupGrammar((_LONGCAT,), Think(("<longcat_think>", "<think>"), ("</longcat_think>", "</think>")))
    ),
    "minicpm5": _row(_MINICPM5),
    "minimax_m1": _row(_LIST_TAG),
    "minimax_m2": ParserFamily(MarkupGrammar((_MINIMAX_M2,), _THINK, tool_ends_think="always"), opens=True),
    "minimax_m3": ParserFamily(
        MarkupGrammar((MiniMaxM3Calls(),), Think(("<mm:think>",), ("</mm:think>",)), tool_ends_think="always")
    ),
    "mistral": ParserFamily(_MISTRAL),
    "mistral_v3": ParserFamily(_MISTRAL),
    "muse": ParserFamily(
        Channels(
            ("<|start|>", "<|message|>"),
            ("<|eom|>", "<|eot|>"),
            body=_MUSE,
            reasoning_end="<|eom|><|start|>assistant to=user<|message|>",
        )
    ),
    "nemotron_v2": _row(JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",))),
    "nemotron_v3": _row(_QWEN_XML),
    "olmo3_pythonic": _row(PythonCalls(("<function_calls>",), ("</function_calls>",)), keep_gap=True),
    "phi4mini": _row(JsonCalls(("functools[", "<|tool_call|>"), ("<|/tool_call|>",))),
    "pythonic": ParserFamily(MarkupGrammar(think=_THINK, opening=_PYTHON_MESSAGE)),
    "qwen3_coder": ParserFamily(_QWEN_LINE),
    "qwen3_think": ParserFamily(
        _QWEN_LINE,
        opens=True,
        undeclared=MarkupGrammar((Verbatim(("<tool_call>",)),), _THINK, tool_ends_think="line"),
    ),
    "seed_oss": ParserFamily(MarkupGrammar((_SEED,), Think(("<seed:think>",), ("</seed:think>",)))),
    "solar_open": ParserFamily(
        MarkupGrammar(
            (_SOLAR,), Think(("<|think|>",), ("<|end|>",)), ("<|begin|>assistant", "<|content|>", "<|calls|>")
        )
    ),
    "spark": _row(_GLM),
    "step3": _row(_STEP3),
    "step3p5": _row(_QWEN_XML, keep_gap=True),
    "xlam": _row(_XLAM, think=None),
}

ALIASES: Final[dict[str, str]] = {
    "apriel1.6": "apriel16", "bielik": "hermes", "cohere": "command_r7b", "command_r_plus": "command_r",
    "deepseek_v3.1": "deepseek_v31", "deepseek_v3.2": "deepseek_v32", "dots1": "hermes",
    "dots3": "dots", "dots3_note": "dots", "dots_llm1": "hermes", "ernie": "ernie45", "exaone": "hermes",
    "firefunction": "phi4mini", "firefunction_v2": "phi4mini", "functionary": "functionary_v32",
    "functiongemma": "function_gemma", "gemma": "gemma4", "gigachat3": "gigachat", "glm": "glm47", "glm46": "glm45",
    "gpt_oss": "harmony", "gpt-oss": "harmony", "granite4": "granite", "hunyuan": "hunyuan_a13b",
    "hunyuan_v3": "hy_v3", "internlm": "internlm2", "internlm3": "internlm2", "json_tools": "hermes",
    "kimi": "kimi_k2", "laguna": "glm47", "lfm2": "lfm2_pythonic", "ling": "ling3", "llama": "llama3_json",
    "llama3": "llama3_json", "llama4": "llama4_pythonic", "llama4_json": "llama3_json", "magistral": "mistral",
    "mimo": "hermes", "minicpm": "minicpm5", "minimax": "minimax_m2", "muse_spark": "muse", "nemotron": "nemotron_v3",
    "nemotron_json": "nemotron_v2", "olmo3": "olmo3_pythonic", "phi4": "phi4mini", "qwen": "hermes",
    "qwen2.5": "hermes", "qwen25": "hermes", "qwen3": "hermes", "qwen3.5": "qwen3_coder", "qwen3_5": "qwen3_coder",
    "qwen3_xml": "qwen3_coder", "qwen3xml": "qwen3_coder", "qwq": "hermes", "reka": "hermes", "seed": "seed_oss",
    "smollm3": "hermes", "solar": "solar_open", "step": "step3p5", "step3.5": "step3p5",
}  # fmt: skip


class UnknownFamily(ValueError):
    """Raised when no parser has this name."""


def resolve(name: str) -> str:
    """Return the family of a name or alias; raises `UnknownFamily`."""
    plain = name.strip().lower().replace("-", "_")
    for known in (plain, plain.replace(".", "_")):
        family = ALIASES.get(known, known)
        if family in FAMILIES:
            return family
    raise UnknownFamily(f"unknown parser {name!r}; known are {', '.join(sorted(FAMILIES))}")


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
