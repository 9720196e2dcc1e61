"""Values with markup in required calls: what the grammar allows, the parser reads back as it was written."""

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from protocol.to_worker import ChatPrompt
from tests.support.calls import Called, reasoning_end
from tests.support.models import SPECIALS, tiny_tokenizer
from tests.support.scale import scaled
from tests.worker.output.parsers.tagged_calls import MARKERS, TAGGED, rendered
from worker.output.detokenize import Vocabulary
from worker.output.parsers.parser import make_parser
from worker.output.parsers.reader import Controls
from worker.output.parsers.xml_notation import spellings
from worker.structured.row_constraint import Rule, Rules
from worker.structured.tool_rules import ToolRules

FAMILIES: Final = [family for family in TAGGED if family != "muse"]
# Markers of these families consist of several tags. They are control tokens in the families' vocabularies.
OF_SEVERAL_TAGS: Final = {"kimi_k3", "step3"}
each_family = pytest.mark.parametrize("family", FAMILIES)
each_family_of_single_tags = pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in OF_SEVERAL_TAGS]
)
each_vocabulary = pytest.mark.parametrize("has_tokens", [True, False], ids=["some control tokens", "no tokens"])


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
def tokenizer(has_tokens: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with control tokens for some markup, or one of single bytes."""
    return tiny_tokenizer([]) if has_tokens else byte_tokenizer()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>")


def made_rule(family: str, known: PreTrainedTokenizerFast) -> Rule:
    eos_ids = [known.convert_tokens_to_ids("<|im_end|>")]
    rules = Rules(known, family, len(known), eos_ids, Vocabulary(known).token_bytes)
    made = ToolRules(rules, known, family, eos_ids).make(
        ChatPrompt([], TOOLS, must_call=True), reasoning_end(family), 800
    )
    assert made is not None
    assert not made.grammar.deviations
    return made


@cache
def rule(family: str, has_tokens: bool) -> Rule:
    return made_rule(family, tokenizer(has_tokens))


def is_allowed(family: str, text: str, has_tokens: bool = False) -> bool:
    known = tokenizer(has_tokens)
    eos_id = known.convert_tokens_to_ids("<|im_end|>")
    return rule(family, has_tokens).grammar.walk().fits([*known.encode(text), eos_id])


def has_token(text: str) -> bool:
    """Whether the tokenizer has a token for markup in the text, which the grammar allows in no value."""
    return any(token in text for token in SPECIALS)


def written(family: str, name: str, arguments: Mapping[str, str]) -> str:
    return rendered(family, [(name, arguments)])


def is_read_back(family: str, name: str, arguments: Mapping[str, str]) -> bool:
    """Whether the parser reads a call as it was written."""
    called = Called.read(family, written(family, name, arguments), TOOLS)
    return not called.malformed and [(found, json.loads(text)) for found, text in called.calls] == [(name, arguments)]


def calls_of(family: str) -> list[str]:
    """Whole calls, also several ones and one that quotes another."""
    inner = written(family, "h", {"z": "2"})
    calls = [("write", {"path": "p", "body": "q\nr"}), ("now", {}), ("h", {"z": "1"}), ("h", {"z": f"The {inner}."})]
    return [*(rendered(family, [call]) for call in calls), rendered(family, calls[:3])]


def own_markers(family: str) -> list[str]:
    form = TAGGED[family].form
    keys = ("new", "body", "z")
    starts = [form.param + label + form.key_end for key in keys for label in (key, f' name="{key}"')]
    return [form.param_end, form.call_end, *form.wrap_end, *form.openers, form.param, *starts, form.key_end,
            *filter(None, [form.value])]  # fmt: skip


CALLS_OF_ALL: Final = [call for family in FAMILIES for call in calls_of(family)]
BESIDE: Final = ["\n", " ", "x", "x\n", "{}", "<", ">", '"', "=", "new", "f>", ' name="new"', "/>", "\x1c", "\t\n  "]


@st.composite
def values(draw: st.DrawFn, family: str) -> str:
    """Values of markers and calls, of any family and mostly of this one: whole, cut and doubled."""
    own, calls = own_markers(family), calls_of(family)
    whole = st.one_of(
        st.sampled_from(own), st.sampled_from(own), st.sampled_from(calls), st.sampled_from(MARKERS),
        st.sampled_from(CALLS_OF_ALL),
    )  # fmt: skip
    cut = st.builds(
        lambda text, at, is_end: text[at:] if is_end else text[:at], whole, st.integers(1, 60), st.booleans()
    )
    holed = st.builds(lambda text, at: text[:at] + text[at + 1 :], whole, st.integers(0, 200))
    doubled = st.builds(lambda text, gap: text + gap + text, whole, st.sampled_from(["", "\n", "x"]))
    pieces = st.one_of(whole, whole, cut, holed, doubled, st.sampled_from(BESIDE), st.sampled_from(BESIDE))
    return "".join(draw(st.lists(pieces, max_size=6)))


def arguments_with(value: str) -> list[tuple[str, dict[str, str]]]:
    """Calls with this value as their first, their last, their only or their optional argument."""
    return [
        ("write", {"path": "a", "body": value}),
        ("write", {"path": value, "body": "b"}),
        ("edit", {"old": value}),
        ("edit", {"old": value, "new": "n"}),
        ("edit", {"old": "o", "new": value}),
    ]


@each_vocabulary
@each_family
@given(data=st.data())
@settings(max_examples=scaled(400, 40), deadline=None)
def test_a_call_that_the_grammar_allows_is_read_back_as_it_was_written(
    family: str, has_tokens: bool, data: st.DataObject
) -> None:
    name, arguments = data.draw(st.sampled_from(arguments_with(data.draw(values(family)))))
    raw = written(family, name, arguments)
    if is_allowed(family, raw, has_tokens):
        called = Called.read(family, raw, TOOLS)
        calls = [(found, json.loads(text)) for found, text in called.calls]
        # A value may spell the end of its argument and a whole further argument.
        assert calls == [(name, arguments)] or rendered(family, calls) == raw, raw
        assert not called.malformed


@each_family_of_single_tags
def test_a_last_value_may_hold_every_marker_of_its_family_that_the_parser_reads_as_text(family: str) -> None:
    form = TAGGED[family].form
    # An end before a tag may be the end of the value.
    end_before_tag = re.compile(rf"(?:{'|'.join(map(re.escape, spellings(form.param_end)))})\s*<")
    for marker in own_markers(family):
        for text in [marker, marker + marker, f"{marker} {marker}", *(marker[:at] for at in range(1, len(marker)))]:
            value = f"The {text} is quoted.\nEnd"
            raw = written(family, "write", {"path": "a", "body": value})
            assert is_allowed(family, raw) == (end_before_tag.search(value) is None), text
            assert is_read_back(family, "write", {"path": "a", "body": value})


@each_family_of_single_tags
def test_any_value_may_hold_whole_calls_of_its_family(family: str) -> None:
    for call in calls_of(family):
        for text in [call, f"{call}\n{call}", f"{call} and {call}"]:
            for name, arguments in arguments_with(f"See {text}: it is quoted."):
                assert is_allowed(family, written(family, name, arguments)), text
                assert is_read_back(family, name, arguments), text


@each_family_of_single_tags
def test_any_value_may_hold_whole_calls_of_other_families(family: str) -> None:
    form = TAGGED[family].form
    # Some families share a part of their markers.
    shared = {*spellings(form.param_end), form.call or form.wrap[0], form.param}
    for call in CALLS_OF_ALL:
        for name, arguments in arguments_with(f"See {call}: it is quoted."):
            assert is_allowed(family, written(family, name, arguments)) or any(marker in call for marker in shared)


@each_family_of_single_tags
def test_a_first_value_may_hold_the_start_of_a_parameter_that_no_tool_has(family: str) -> None:
    form, look = TAGGED[family].form, TAGGED[family].look
    for key, is_declared in [("other", False), ("bodyless", False), ("bod", False), ("body", True), ("old", True)]:
        label = look.key.format(key=key, type="string", is_string="true")
        arguments = {"path": f"The {form.param}{label}{form.key_end} is quoted.", "body": "b"}
        assert is_allowed(family, written(family, "write", arguments)) != is_declared
        assert is_declared or is_read_back(family, "write", arguments)


@each_family
def test_a_value_may_hold_markup_beside_control_tokens(family: str) -> None:
    form = TAGGED[family].form
    # Without a character that begins the next tag, a grammar could not tell whether an end is one.
    ends = [] if has_token(form.param + form.call_end) else [form.param_end]
    for text in [*ends, form.call_end, *form.wrap_end, form.param + "path" + form.key_end, "<b>x</b>", '{"name": "f"}']:
        raw = written(family, "write", {"path": "a", "body": f"The {text} is quoted.\nEnd"})
        assert has_token(text) or is_allowed(family, raw, has_tokens=True), text


@pytest.mark.parametrize("family", ["longcat", "dots"])
def test_a_value_quotes_no_call_if_its_markers_are_tokens_that_other_tokens_can_spell(family: str) -> None:
    tokens = ["<longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_key>", "</longcat_arg_value>"]
    known = tiny_tokenizer(tokens, are_special=False)
    grammar = made_rule(family, known).grammar
    for text in [*own_markers(family)[1:3], *calls_of(family)[2:4]]:
        raw = written(family, "write", {"path": "a", "body": f"See {text}: it is quoted."})
        is_whole_call = text in calls_of(family)
        assert grammar.walk().fits(known.encode(raw)) != (is_whole_call and family == "longcat"), text


@each_vocabulary
@each_family
def test_a_call_that_is_cut_in_a_quoted_call_is_finished_within_the_tokens_that_are_kept_for_it(
    family: str, has_tokens: bool
) -> None:
    made, known = rule(family, has_tokens), tokenizer(has_tokens)
    raw = written(family, "edit", {"old": f"See {calls_of(family)[3]} and {calls_of(family)[0]}."})
    tokens = known.encode(raw)
    for size in range(0, len(tokens), scaled(1, 9)):
        walk, text = made.grammar.walk(), list(tokens[:size])
        if not walk.fits(text):
            break
        walk.take(text)
        while not ((allowed := walk.allowed())[list(made.eos_ids)]).any():
            assert made.finish is not None
            further = list(made.finish.way(walk, allowed) or (int(allowed.argmax()),))
            walk.take(further)
            text += further
            assert len(text) - size <= made.reserve, known.decode(text)
        assert not Called.read(family, str(known.decode(text)), TOOLS).malformed, known.decode(text)


# Markers that are tokens of published vocabularies, and whether they are special there.
PUBLISHED: Final = {
    "qwen3_coder": (["<tool_call>", "</tool_call>"], False),
    "nemotron_v3": (["<tool_call>", "</tool_call>"], False),
    "step3p5": (["<tool_call>", "</tool_call>"], False),
    "glm45": (["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"], False),
    "minimax_m2": (["<minimax:tool_call>", "</minimax:tool_call>"], False),
    "seed_oss": (["<seed:tool_call>", "</seed:tool_call>"], True),
    "deepseek_v32": (["｜DSML｜"], True),
    "deepseek_v4": (["｜DSML｜"], True),
    "kimi_k3": (["<|open|>", "<|close|>", "<|sep|>"], True),
    "step3": (
        [f"<｜tool_{word}｜>" for word in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")], True,
    ),
}  # fmt: skip
each_published = pytest.mark.parametrize("family", PUBLISHED)


class Spelled:
    """A call whose own markers are tokens, and whose value spells the same markers with ordinary tokens."""

    def __init__(self, family: str, name: str, arguments: Mapping[str, str], value: str) -> None:
        tokens, are_special = PUBLISHED[family]
        self.family, self.call = family, (name, dict(arguments))
        self.controls = Controls(dict.fromkeys(tokens, are_special))
        marks = re.compile(f"({'|'.join(map(re.escape, tokens))})")
        around = written(family, name, {key: "\0" if text == value else text for key, text in arguments.items()})
        before, after = ([(piece, piece in tokens) for piece in marks.split(text)] for text in around.split("\0"))
        self.pieces = [*before, (value, False), *after]

    @property
    def is_allowed(self) -> bool:
        known, rule = published(self.family)
        ids: list[int] = []
        for text, is_token in self.pieces:
            # Single characters spell no token of a marker.
            ids += known.encode(text) if is_token else [token for char in text for token in known.encode(char)]
        return rule.grammar.walk().fits([*ids, known.eos_token_id])

    @property
    def is_read_back(self) -> bool:
        parser, at, events = (
            make_parser(self.family, tools=TOOLS, controls=self.controls, start_in_reasoning=False),
            0,
            [],
        )
        for text, is_token in self.pieces:
            if is_token:
                parser.note_control(at)
            events += parser.feed(text)
            at += len(text)
        called = Called.of([*events, *parser.finish()], parser.malformed)
        return not called.malformed and [(name, json.loads(text)) for name, text in called.calls] == [self.call]


@cache
def published(family: str) -> tuple[PreTrainedTokenizerFast, Rule]:
    """A tokenizer of single bytes and of the family's published tokens, and its rule."""
    tokens, are_special = PUBLISHED[family]
    known = byte_tokenizer()
    known.add_tokens([AddedToken(each, special=are_special, normalized=False) for each in tokens], are_special)
    return known, made_rule(family, known)


@each_published
@given(data=st.data())
@settings(max_examples=scaled(400, 40), deadline=None)
def test_a_call_that_is_allowed_is_read_back_if_its_own_markers_are_tokens(family: str, data: st.DataObject) -> None:
    value = data.draw(values(family).filter(bool))
    call = Spelled(family, *data.draw(st.sampled_from(arguments_with(value))), value)
    assert call.is_read_back or not call.is_allowed, call.pieces


@pytest.mark.parametrize("family", [family for family in PUBLISHED if family != "step3"])
def test_any_value_may_spell_whole_calls_of_its_family_if_their_markers_are_tokens(family: str) -> None:
    for quoted in calls_of(family):
        for text in [quoted, f"{quoted}\n{quoted}", f"{quoted} and {quoted}"]:
            value = f"See {text}: it is quoted."
            for name, arguments in arguments_with(value):
                call = Spelled(family, name, arguments, value)
                assert call.is_allowed, text
                assert call.is_read_back, text


@each_published
def test_any_value_may_spell_the_ends_of_its_family_if_their_markers_are_tokens(family: str) -> None:
    form = TAGGED[family].form
    for text in [form.param_end, form.call_end, *form.wrap_end]:
        value = f"The {text} is quoted."
        for name, arguments in arguments_with(value):
            call = Spelled(family, name, arguments, value)
            assert call.is_allowed, text
            assert call.is_read_back, text


M3_MARK: Final = "]<]minimax[>["
M3_TAGS: Final = [
    f"{M3_MARK}<{slash}{tag}>" for slash in ("", "/") for tag in ("path", "body", "x", "invoke", "tool_call")
]


def m3_call(value: str) -> str:
    parameters = f"{M3_MARK}<path>a{M3_MARK}</path>{M3_MARK}<body>{value}{M3_MARK}</body>"
    invoke = f'{M3_MARK}<invoke name="write">{parameters}{M3_MARK}</invoke>'
    return f"{M3_MARK}<tool_call>\n{invoke}\n{M3_MARK}</tool_call>"


@given(
    pieces=st.lists(st.sampled_from([*M3_TAGS, *M3_TAGS, *MARKERS, M3_MARK, M3_MARK[:5], "<x>", *BESIDE]), max_size=7)
)
@settings(max_examples=scaled(400, 80), deadline=None)
def test_a_text_of_minimax_m3_may_hold_all_tags_but_its_own_and_is_read_back(pieces: list[str]) -> None:
    value = "".join(pieces)
    called = Called.read("minimax_m3", m3_call(value), TOOLS)
    is_read = not called.malformed and [json.loads(text) for _, text in called.calls] == [{"path": "a", "body": value}]
    assert is_allowed("minimax_m3", m3_call(value)) == (not re.search(rf"{re.escape(M3_MARK)}</?body>", value))
    assert is_read or not is_allowed("minimax_m3", m3_call(value))
