"""Grammars of calls: whatever a model picks among the tokens that they allow, its family's parser reads valid calls."""

import random
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from protocol.to_worker import ChatPrompt
from tests.support.calls import CALLING, TOOLS, Called, check, markers, reasoning_end, tool
from tests.support.models import tiny_tokenizer
from tests.support.scale import scaled
from worker.errors import RequestInvalid
from worker.output.detokenize import Vocabulary
from worker.structured.row_constraint import Guide, Rule, Rules
from worker.structured.tool_grammar.build import HEADS
from worker.structured.tool_rules import ToolRules

ROOM = 800
STRICT = [tool("f", {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 4}},
                     "required": ["n"]})]  # fmt: skip


@cache
def tokenizer(are_special: bool) -> PreTrainedTokenizerFast:
    return tiny_tokenizer(markers(), are_special=are_special)


@cache
def token_bytes(are_special: bool) -> list[bytes]:
    return Vocabulary(tokenizer(are_special)).token_bytes


def maker(family: str, are_special: bool = True) -> ToolRules:
    known = tokenizer(are_special)
    eos_ids = [known.convert_tokens_to_ids("<|im_end|>")]
    return ToolRules(Rules(known, family, len(known), eos_ids, token_bytes(are_special)), known, family, eos_ids)


def make(family: str, prompt: ChatPrompt, are_special: bool = True, room: int = ROOM) -> Rule:
    rule = maker(family, are_special).make(prompt, reasoning_end(family), room)
    assert rule is not None
    return rule


def walk(rule: Rule, seed: int, start: str = "", are_special: bool = True, room: int = ROOM) -> str | None:
    """Walk the grammar at random until it allows anything; None if the walk comes to no end.

    Odd seeds have favourite tokens.
    """
    known, rng, guide = tokenizer(are_special), random.Random(seed), Guide(rule)
    liking = np.array([rng.gauss(0, 3 * (seed % 2)) for _ in range(len(known))])
    ids: list[int] = known.encode(start)
    for token in ids:
        guide.take(token)
    while len(ids) < room:
        allowed = guide.allowed()
        if allowed is None:
            return str(known.decode(ids, skip_special_tokens=False))
        options = np.flatnonzero(allowed)
        token = int(rng.choices(options, weights=np.exp(liking[options]))[0])
        guide.take(token)
        if token in rule.eos_ids:
            return str(known.decode(ids, skip_special_tokens=False))
        ids.append(token)
    return None


@pytest.mark.parametrize("are_special", [True, False], ids=["control tokens", "plain tokens"])
@pytest.mark.parametrize("family", CALLING)
def test_a_call_that_is_required_is_valid_and_whole_within_its_room(family: str, are_special: bool) -> None:
    rule = make(family, ChatPrompt([], TOOLS, must_call=True), are_special)
    for seed in range(scaled(6, 1 + are_special)):
        text = walk(rule, seed, are_special=are_special)
        assert text is not None, seed
        called = Called.read(family, text)
        check(called.calls)
        assert not called.content.strip(), text
        assert not called.malformed, text


@pytest.mark.parametrize("family", CALLING)
def test_a_named_tool_is_called_once(family: str) -> None:
    rule = make(family, ChatPrompt([], TOOLS, must_call=True, callable_tools=("set-it",), one_call=True))
    for seed in range(scaled(4, 2)):
        called = Called.read(family, walk(rule, seed) or "")
        check(called.calls)
        assert [name for name, _ in called.calls] == ["set-it"]


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "gemma4", "kimi_k3", "lfm2_pythonic", "harmony"])
def test_a_schema_that_no_grammar_can_hold_leaves_the_arguments_free(family: str) -> None:
    impossible: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b\\1"}}}
    rule = make(family, ChatPrompt([], [tool("f", impossible)], must_call=True, one_call=True))
    called = Called.read(family, walk(rule, 1) or "", [tool("f")])
    assert [name for name, _ in called.calls] == ["f"]


@pytest.mark.parametrize("family", CALLING)
def test_a_list_of_one_item_at_most_is_held(family: str, caplog: pytest.LogCaptureFixture) -> None:
    one = {"type": "array", "items": {"type": "boolean"}, "maxItems": 1}
    outer = {"type": "array", "items": one, "minItems": 1, "maxItems": 2}
    tools = [tool("f", {"type": "object", "properties": {"x": outer}, "required": ["x"]})]
    rule = make(family, ChatPrompt([], tools, must_call=True, one_call=True))
    for seed in range(scaled(4, 2)):
        check(Called.read(family, walk(rule, seed) or "", tools).calls, tools)
    assert not caplog.records


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "harmony", "gemma4"])
def test_a_schema_that_no_grammar_can_hold_is_refused_where_it_is_strict(family: str, must_call: bool) -> None:
    tools = [tool("g"), tool("f", {"type": "object", "properties": {"x": {"not": {"type": "string"}}}})]
    with pytest.raises(RequestInvalid, match=r"The tool 'f' is strict, but .* cannot be enforced: .*not") as caught:
        make(family, ChatPrompt([], tools, must_call=must_call, strict_tools=("f",)))
    assert caught.value.failure.param == "tools"


BESIDE: dict[str, dict[str, Any]] = {
    "a type and an enum": {"type": "string", "enum": ["a", 1, None]},
    "a type that no value has": {"type": "integer", "enum": ["a", True]},
    "a limit and an enum": {"enum": ["a", "bcd"], "maxLength": 2},
    "a pattern and an enum": {"enum": ["a", "bcd"], "pattern": "^b"},
    "a type and options": {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]},
    "a limit and options": {"maxLength": 1, "anyOf": [{"type": "string"}, {"type": "null"}]},
    "options that are required": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "an enum among options": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
    "all of a reference": {"allOf": [{"$ref": "#/$defs/color"}]},
    "all of two": {"type": "string", "allOf": [{"$ref": "#/$defs/color"}, {"maxLength": 3}]},
    "a limit and a reference": {"$ref": "#/$defs/color", "maxLength": 3},
    "a list of such": {"type": "array", "items": {"type": "string", "enum": ["a", 1]}, "minItems": 1},
}  # fmt: skip


@pytest.mark.parametrize("schema", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize(
    "family",
    ["hermes", "gemma4", "lfm2_pythonic", "qwen3_coder", "kimi_k3",
     *scaled(["function_gemma", "llama4_pythonic", "glm45", "deepseek_v32", "minimax_m3", "seed_oss"], [])],
)  # fmt: skip
def test_what_stands_beside_other_keywords_is_held_or_refused_where_it_is_strict(
    family: str, schema: dict[str, Any]
) -> None:
    colors = {"color": {"type": "string", "enum": ["red", "green"]}}
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": colors}
    check_strict(family, [tool("f", whole)])


@pytest.mark.parametrize("family", CALLING)
def test_options_of_whole_arguments_are_held_or_refused_where_they_are_strict(family: str) -> None:
    number = {"type": "integer"}
    options = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    check_strict(family, [tool("f", {"type": "object", "properties": {"a": number, "b": number}, **options})])


def check_strict(family: str, tools: list[dict[str, Any]]) -> None:
    try:
        rule = make(family, ChatPrompt([], tools, must_call=True, one_call=True, strict_tools=("f",)))
    except RequestInvalid:
        return
    for seed in range(scaled(4, 2)):
        check(Called.read(family, walk(rule, seed) or "", tools).calls, tools)


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "lfm2_pythonic"])
def test_a_strict_tool_is_held_also_after_it_was_free_beside_one_that_no_grammar_can_hold(family: str) -> None:
    impossible = {"type": "object", "properties": {"x": {"type": "string", "pattern": "(?=a)b\\1"}}}
    tools = [*STRICT, tool("g", impossible)]
    prompt = ChatPrompt([], tools, must_call=True, one_call=True)
    rules = maker(family)
    rules.make(prompt, reasoning_end(family), ROOM)
    rule = rules.make(msgspec.structs.replace(prompt, strict_tools=("f",)), reasoning_end(family), ROOM)
    assert rule is not None
    for seed in range(scaled(8, 3)):
        called = Called.read(family, walk(rule, seed, room=4000) or "", tools)
        check([call for call in called.calls if call[0] == "f"] or [("f", '{"n": 3}')], STRICT)


@pytest.mark.parametrize(
    "family", ["hermes", "qwen3_coder", "glm45", "mistral", "kimi_k2", "gemma4", "deepseek_v31", "muse"]
)
def test_strict_arguments_fit_once_a_call_has_begun_and_text_is_free(family: str) -> None:
    prompt = ChatPrompt([], STRICT, strict_tools=("f",))
    rule = make(family, prompt)
    trigger = rule.prologue.ends[0].decode()
    guide = Guide(rule)
    assert guide.allowed() is None
    for seed in range(scaled(3, 2)):
        text = walk(rule, seed, start="Well <b> then" + trigger, room=2000)
        called = Called.read(family, text or "", STRICT)
        check(called.calls, STRICT)
        assert called.content.startswith("Well <b> then")


BEGINNINGS = {
    "llama3_json": '{"name": "NAME", "parameters":',
    "xlam": '[{"name": "NAME", "arguments":',
    "llama4_pythonic": "[NAME(",
    "pythonic": "[NAME(",
    "functionary_v32": "all\nWell.>>>NAME\n",
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
}
ENDS = {"llama3_json": "}", "xlam": "}]", "llama4_pythonic": "]", "pythonic": "]", "harmony": "<|call|>"}


@pytest.mark.parametrize("family", HEADS)
def test_strict_arguments_fit_where_only_the_head_of_a_call_tells_that_it_has_begun(family: str) -> None:
    other = tool("g", {"type": "object", "properties": {"s": {"const": "only this"}}, "required": ["s"]})
    tools = [*STRICT, other, tool("loose")]
    rule = make(family, ChatPrompt([], tools, strict_tools=("f", "g")))
    assert Guide(rule).allowed() is None
    for name in ("f", "g"):
        for seed in range(scaled(3, 2)):
            text = walk(rule, seed, start=BEGINNINGS[family].replace("NAME", name), room=2000)
            called = Called.read(family, (text or "") + ENDS.get(family, ""), tools)
            check(called.calls, tools)
            assert [found for found, _ in called.calls] == [name]


@pytest.mark.parametrize("family", HEADS)
def test_calls_of_tools_that_are_not_strict_and_answers_that_look_like_calls_stay_free(family: str) -> None:
    rule = make(family, ChatPrompt([], [*STRICT, tool("loose")], strict_tools=("f",)))
    guide = Guide(rule)
    said = '{"name": "Bob", "parameters": 1} [loose(x=1)] to=functions.loose f(x) >>>all\n'
    for token in tokenizer(True).encode(said):
        guide.take(token)
        assert guide.allowed() is None
