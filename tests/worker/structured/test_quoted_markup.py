"""Values with markup in required calls: what the grammar allows, the parser reads back as it was written."""

import json
import re
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from protocol.prompts import ChatPrompt
from tests.support.calls import Called, reasoning_end
from tests.support.models import SPECIALS, tiny_tokenizer
from tests.support.scale import scaled
from tests.worker.output.parsers.tagged_calls import MARKERS, TAGGED, rendered
from worker.output.detokenize import Vocabulary
from worker.output.parsers.xml_notation import spellings
from worker.structured.guides import Rule, Rules
from worker.structured.tool_rules import ToolRules

FAMILIES: Final = [family for family in TAGGED if family != "muse"]
each_family = pytest.mark.parametrize("family", FAMILIES)


def tool(name: str, required: list[str], **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS: Final = [
    tool("write", ["path", "body"], path="string", body="string"),
    tool("edit", ["old"], old="string", new="string"),
    tool("now", []),
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without tokens for markup, so that ordinary tokens spell all of it."""
    return tiny_tokenizer([])


@cache
def rule(family: str) -> Rule:
    known = tokenizer()
    eos_ids = [known.convert_tokens_to_ids("<|im_end|>")]
    rules = Rules(known, family, len(known), eos_ids, Vocabulary(known).token_bytes)
    made = ToolRules(rules, known, family, eos_ids).make(
        ChatPrompt([], TOOLS, must_call=True), reasoning_end(family), 800
    )
    assert made is not None
    return made


def is_allowed(family: str, text: str) -> bool:
    return rule(family).grammar.walk().fits(tokenizer().encode(text))


def has_token(text: str) -> bool:
    """Whether the tokenizer has a token for markup in the text, which the grammar allows in no value."""
    return any(token in text for token in SPECIALS)


def written(family: str, name: str, arguments: dict[str, str]) -> str:
    return rendered(family, [(name, arguments)])


@st.composite
def values(draw: st.DrawFn, family: str) -> str:
    form = TAGGED[family].form
    own = [form.param_end, form.call_end, *form.wrap_end, *form.openers, form.param + "new" + form.key_end, "new",
           form.param + ' name="new"' + form.key_end, "f>", form.key_end, form.value]  # fmt: skip
    pieces = st.one_of(st.sampled_from(own), st.sampled_from(MARKERS), st.sampled_from(["\n", " ", "x", "x\n", "{}"]))
    return "x" + "".join(draw(st.lists(pieces, max_size=7))) + "x"


@each_family
@given(data=st.data())
@settings(max_examples=scaled(400, 40), deadline=None)
def test_a_call_that_the_grammar_allows_is_read_back_as_it_was_written(family: str, data: st.DataObject) -> None:
    value = data.draw(values(family))
    name, arguments = data.draw(
        st.sampled_from(
            [
                ("write", {"path": "a", "body": value}),
                ("write", {"path": value, "body": "b"}),
                ("edit", {"old": value}),
                ("edit", {"old": value, "new": "n"}),
                ("edit", {"old": "o", "new": value}),
            ]
        )
    )
    raw = written(family, name, arguments)
    if is_allowed(family, raw):
        called = Called.read(family, raw, TOOLS)
        calls = [(found, json.loads(text)) for found, text in called.calls]
        # A value may spell the end of its argument and a whole further argument.
        assert calls == [(name, arguments)] or rendered(family, calls) == raw, raw
        assert not called.malformed


@each_family
def test_a_grammar_allows_markup_that_the_parser_reads_as_text(family: str) -> None:
    form = TAGGED[family].form
    # An end before a tag may be the end of the value.
    ends = "|".join(map(re.escape, spellings(form.param_end)))
    own = re.compile("|".join([*map(re.escape, filter(None, form.openers)), rf"(?:{ends})\s*<"]))
    others = [rendered(other, [("f", {"a": "1"})]) for other in FAMILIES]
    quoted = [form.call_end, *form.wrap_end, form.param + "path" + form.key_end, *others, "<b>x</b>", '{"name": "f"}']
    # Without a character that begins the next tag, a grammar could not tell whether an end is one.
    for text in [*([] if has_token(form.param + form.call_end) else [form.param_end]), *quoted]:
        raw = written(family, "write", {"path": "a", "body": f"The {text} is quoted.\nEnd"})
        assert has_token(text) or is_allowed(family, raw) == (own.search(text) is None), text
