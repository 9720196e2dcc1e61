"""Templates get messages in the shape they can take, and nothing of a conversation is lost."""

from typing import Any

import pytest

from protocol.failures import Code
from protocol.to_worker import ChatPrompt
from worker.errors import RequestInvalid
from worker.prompt.templates import Renderer

LINE = "{{- '[' + m.role + ']' + (m.content or '') }}"
CALLS = "{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name + '|' + ARGUMENTS + '</call>' }}{%- endfor %}"
PLAIN = "{%- for m in messages %}" + LINE + "{%- endfor %}{%- if add_generation_prompt %}[assistant]{%- endif %}"
TOOLS = "{%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}{%- for m in messages %}" + LINE
STRICT = """
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}{%- endfor %}"""
NO_SYSTEM = """
{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}{%- endfor %}"""

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_abc", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_abc", "name": "get_weather", "content": "sunny"},
]


class Tokenizer:
    """The part of a tokenizer that `Renderer` uses."""

    has_chat_template = True
    special_tokens_map: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, template: str | dict[str, str]) -> None:
        self.chat_template = template


def render(template: str | dict[str, str], messages: list[dict[str, Any]], **fields: Any) -> str:
    return Renderer(Tokenizer(template)).render(ChatPrompt(messages, **fields))


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("(c.function.arguments | tojson)", '{"city": "Oslo"}'),
        ("c.function.arguments", '{"city": "Oslo"}'),  # joins text: raises on an object
        ("(c.function.arguments | string)", '{"city": "Oslo"}'),  # would write Python's repr of an object
    ],
)
def test_arguments_come_out_as_json_whatever_the_template_does_with_them(arguments: str, written: str) -> None:
    text = render(TOOLS + CALLS.replace("ARGUMENTS", arguments) + "{%- endfor %}", CONVERSATION, tools=[WEATHER])
    assert f"<call>get_weather|{written}</call>" in text


def test_a_template_that_drops_calls_gets_them_in_the_content() -> None:
    text = render(TOOLS + "{%- endfor %}", CONVERSATION, tools=[WEATHER])
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in text
    assert "sunny" in text


def test_a_template_without_tools_gets_them_as_text_in_the_system_message() -> None:
    text = render(PLAIN, CONVERSATION, tools=[WEATHER])
    assert text.startswith("[system]be kind\n\nYou may call functions")
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "[user]<tool_response>\nsunny\n</tool_response>" in text


def test_a_template_without_tools_is_left_alone_when_there_are_none() -> None:
    assert render(PLAIN, CONVERSATION[:2]) == "[system]be kind[user]weather?[assistant]"


def test_a_system_message_in_the_middle_becomes_the_users_where_the_template_refuses_it() -> None:
    messages = [*CONVERSATION[:2], {"role": "system", "content": "be brief"}]
    assert render(STRICT, messages) == "[system]be kind[user]weather?[user]be brief"


def test_a_system_message_that_the_template_would_drop_in_silence_is_kept() -> None:
    drops = "{%- for m in messages %}{%- if m.role != 'system' or loop.first %}" + LINE + "{%- endif %}{%- endfor %}"
    assert "be brief" in render(drops, [*CONVERSATION[:2], {"role": "system", "content": "be brief"}])


def test_without_a_system_role_its_text_opens_the_first_user_message() -> None:
    messages = [*CONVERSATION[:2], {"role": "user", "content": "now"}]
    assert render(NO_SYSTEM, messages) == "[user]be kind\n\nweather?\n\nnow"


def test_a_template_that_goes_through_tools_in_any_case_gets_an_empty_list() -> None:
    assert render("{%- for t in tools %}x{%- endfor %}" + PLAIN, CONVERSATION[:2]).startswith("[system]be kind")


def test_a_named_template_for_tools_is_used_for_tools() -> None:
    named = {"tool_use": "TOOLS:" + TOOLS + "{%- endfor %}", "default": PLAIN}
    assert render(named, CONVERSATION[:2], tools=[WEATHER]).startswith("TOOLS:")
    assert not render(named, CONVERSATION[:2]).startswith("TOOLS:")


def test_a_chat_with_earlier_calls_keeps_the_template_that_renders_them() -> None:
    text = render(
        {"tool_use": "TOOLS:" + TOOLS + "{%- endfor %}", "default": "{{ messages[0].content }}"}, CONVERSATION
    )
    assert text.startswith("TOOLS:")
    assert "sunny" in text


def test_a_plain_chat_never_gets_the_template_of_another_purpose() -> None:
    named = {"rag": "documents", "tool_use": "TOOLS:" + TOOLS + "{%- endfor %}"}
    assert render(named, CONVERSATION[:2], tools=[WEATHER]).startswith("TOOLS:")
    with pytest.raises(RequestInvalid, match=r"none of its templates \(rag, tool_use\) is the default"):
        render(named, CONVERSATION[:2])


def test_mistrals_ids_are_made_of_nine_characters_and_stay_the_same() -> None:
    template = TOOLS + (
        "{%- if m.tool_call_id and m.tool_call_id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
        "{{- m.tool_call_id or '' }}{%- for c in m.tool_calls or [] %}{{- c.id + (c.function | tojson) }}{%- endfor %}"
        "{%- endfor %}"
    )
    text = render(template, CONVERSATION, tools=[WEATHER])
    assert text == render(template, CONVERSATION, tools=[WEATHER])
    assert "call_abc" not in text


def test_thinking_reaches_the_template_in_each_spelling_and_only_when_asked_for() -> None:
    template = (
        "{{- enable_thinking is defined }}|{{ thinking is defined }}|{{ reasoning_effort or '' }}"
        "{%- for m in messages %}" + LINE + "{%- endfor %}"
    )
    assert render(template, CONVERSATION[:2]).startswith("False|False|")
    assert render(template, CONVERSATION[:2], thinking=True, effort="low").startswith("True|True|low")
    given = {"enable_thinking": False}
    assert "False" in render("{{ enable_thinking }}" + PLAIN, CONVERSATION[:2], thinking=True, template_kwargs=given)


def test_an_effort_that_a_template_refuses_becomes_the_nearest_that_it_takes() -> None:
    picky = "{%- if (reasoning_effort or '') not in ['', 'low', 'high'] %}{{ raise_exception('which?') }}{% endif %}"
    template = picky + "{{- reasoning_effort or 'none' }}" + PLAIN
    assert [render(template, CONVERSATION[:2], effort=effort)[:4] for effort in ("low", "medium", "high", "")] == [
        "low[", "high", "high", "none",
    ]  # fmt: skip


def test_a_template_that_takes_no_shape_is_a_clear_error() -> None:
    with pytest.raises(RequestInvalid) as caught:
        render("{{ raise_exception('never') }}", CONVERSATION[:2])
    assert caught.value.failure.code is Code.TEMPLATE_ERROR
    assert "never" in caught.value.failure.message


def test_a_template_that_knows_only_plain_schemas_gets_plain_ones() -> None:
    picky = """{%- for tool in tools %}{%- for name, p in tool.function.parameters.properties.items() %}
    {{- raise_exception('no type') if p.type is not string }}{{ name + ':' + p.type + ':' + p.description + ';' }}
    {%- endfor %}{%- endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": ["string", "null"], "description": "one"},
            "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
            "c": {},
            "d": {"type": "array", "items": {"$ref": "#/$defs/d"}},
        },
        "$defs": {"n": {"type": "integer"}, "d": {"type": "array", "items": {"$ref": "#/$defs/d"}}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = render(picky, [{"role": "user", "content": "hi"}], tools=[tool])

    assert text == "a:string:one;b:integer:;c:string:;d:array:;hi"


ONE_CALL = (
    "{%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}{%- for m in messages %}{{- '[' + m.role + ']' }}"
)
ONE_CALL_END = (
    "{%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}{{- f.name + (f.arguments | tojson) }}{%- endif %}"
    "{%- endfor %}"
)


def _parallel(**fields: Any) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
        for n, city in enumerate(("Oslo", "Rome"))
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": said} for n, said in ((1, "warm"), (0, "cold"))]
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls, **fields},
        *results,
    ]


@pytest.mark.parametrize(
    "refusal", ["", "{%- if m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{%- endif %}"]
)
def test_where_only_one_call_a_turn_is_taken_each_has_a_turn_and_its_own_result(refusal: str) -> None:
    template = f"{ONE_CALL}{{{{- m.content }}}}{refusal}{ONE_CALL_END}"
    text = render(template, _parallel(content="I ask."), tools=[WEATHER])

    oslo, rome = 'get_weather{"city": "Oslo"}', 'get_weather{"city": "Rome"}'
    assert text == f"get_weather[user]q[assistant]I ask.{oslo}[tool]cold[assistant]{rome}[tool]warm"


def test_where_a_turn_with_calls_takes_words_or_reasoning_it_gets_both_as_reasoning() -> None:
    both = "{%- if m.content and m.reasoning_content %}{{ raise_exception('one of them!') }}{%- endif %}"
    template = f"{ONE_CALL}{both}{{{{- m.content or m.reasoning_content }}}}{ONE_CALL_END}"
    text = render(template, _parallel(content="I ask.", reasoning_content="Hm."), tools=[WEATHER])

    assert '[assistant]Hm.\n\nI ask.get_weather{"city": "Oslo"}[tool]cold[assistant]' in text


def test_calls_and_results_that_do_not_match_are_kept_in_order() -> None:
    template = f"{ONE_CALL}{{{{- m.content }}}}{ONE_CALL_END}"
    messages = [*_parallel()[:2], {"role": "tool", "tool_call_id": "gone", "content": "lost"}]

    assert render(template, messages, tools=[WEATHER]).endswith('{"city": "Rome"}[tool]lost')


def test_tools_as_text_are_given_where_a_template_wants_them_so() -> None:
    wants = "{{- 'FUNCTIONS ' + functions + ' ON ' + datetime }}" + PLAIN
    text = render(wants, CONVERSATION[:2], tools=[WEATHER])
    assert '"name": "get_weather"' in text
    assert render(wants, CONVERSATION[:2]).startswith("FUNCTIONS [] ON 20")


@pytest.mark.parametrize(
    "tools",
    [
        "{{ raise_exception('no tools') if tools }}",
        "{{ (tools | map(attribute='function')) | tojson if tools }}",
        "{% if tools %}{% endif %}",
    ],
)
def test_a_template_that_raises_on_tools_or_ignores_them_gets_them_as_text(tools: str) -> None:
    text = render(tools + PLAIN, CONVERSATION, tools=[WEATHER])
    assert text.startswith("[system]be kind\n\nYou may call functions")
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text


def test_a_system_message_that_is_only_shown_before_a_question_is_kept_behind_a_result() -> None:
    asks = """
    {%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
    {%- endif %}
    {%- for t in tools or [] %}{{- t.function.name }}{%- endfor %}
    {%- for m in messages %}{{- '[' + m.role + ']' }}
    {%- if loop.last and m.role == 'user' %}{{- system or '' }}{% endif %}{{- m.content }}
    {%- for c in m.tool_calls or [] %}{{- c.function.arguments | tojson }}{%- endfor %}{%- endfor %}"""
    assert "be kind" in render(asks, CONVERSATION, tools=[WEATHER])
    assert "be kind" in render(asks, CONVERSATION[:2])


def test_the_first_of_two_system_messages_is_kept_where_only_the_last_counts() -> None:
    last = """{%- set ns = namespace(s='') %}
    {%- for m in messages %}{%- if m.role == 'system' %}{%- set ns.s = m.content %}{%- endif %}{%- endfor %}{{- ns.s }}
    {%- for m in messages if m.role != 'system' %}{{- '[' + m.role + ']' + m.content }}{%- endfor %}"""
    text = render(last, [*CONVERSATION[:2], {"role": "system", "content": "be brief"}])
    assert "be kind" in text
    assert "be brief" in text


def test_words_that_a_template_drops_beside_calls_are_a_message_of_their_own() -> None:
    drops = f"{ONE_CALL}{{%- if not m.tool_calls %}}{{{{- m.content }}}}{{%- endif %}}{ONE_CALL_END}"
    text = render(drops, _parallel(content="I ask."), tools=[WEATHER])
    assert text.startswith('get_weather[user]q[assistant]I ask.[assistant]get_weather{"city": "Oslo"}[tool]cold')


class CountingRenderer(Renderer):
    """Counts how often its template is rendered."""

    renders = 0

    def _render(self, *args: Any, **fields: Any) -> str:
        self.renders += 1
        return super()._render(*args, **fields)


@pytest.mark.parametrize(
    ("template", "renders"),
    [(PLAIN, 2), (PLAIN + "{{ reasoning_effort }}", 8)],
    ids=["effort is nothing to it", "effort is a variable"],
)
def test_a_template_that_refuses_in_the_end_is_rendered_once_for_each_shape(template: str, renders: int) -> None:
    renderer = CountingRenderer(
        Tokenizer("{{ tools }}" + template + "{% if n %}{{ raise_exception('no') }}{% endif %}")
    )
    before = renderer.renders
    prompt = ChatPrompt([{"role": "user", "content": "Hi"}], [WEATHER], effort="high", template_kwargs={"n": 1})
    with pytest.raises(RequestInvalid, match="no"):
        renderer.render(prompt)
    assert renderer.renders - before <= renders


ANSWERS = "{%- for m in messages %}{{- '[' + m.role + ']' }}{%- set c = m.content or '' %}"
SPLITS = ANSWERS + "{{- c.split('</think>')[-1] if m.role == 'assistant' else c }}" + CALLS + "{%- endfor %}"


@pytest.mark.parametrize(
    ("shown", "marker"),
    [
        ("{{- c.split('</think>')[-1] }}", "</think>"),
        ("{{- c.split('</think>')[0] }}", "</think>"),
        ("{{- c.split('</{}>'.format('think'))[-1] }}", "</think>"),
        ("{{- c.split('</mine{}>'.format(''))[-1] }}", "</mine>"),
        ("{{- c.replace('<channel|>', '') }}", "<channel|>"),
        ("{{- c.split('\\n[FINAL]\\n')[-1] }}", "\n[FINAL]\n"),
        ("{{- c.split('</think>')[-1] if '<think>' in c and '</think>' in c else c }}", "<think> and </think>"),
        ("{%- if '<|final|>' in c %}{{ raise_exception('a marker') }}{% endif %}{{- c }}", "<|final|>"),
        ("{{- c if loop.last else c.split('</think>')[-1] }}", "</think>"),
        ("{{- (c.split('</think>')[-1] if m.reasoning_content else c) }}", "</think>"),
    ],
)
def test_an_answer_that_quotes_a_marker_of_the_template_is_rendered_as_it_was_sent(shown: str, marker: str) -> None:
    answer = f"Before{marker}it, and{marker}behind."
    messages = [CONVERSATION[1], {"role": "assistant", "content": answer, "reasoning_content": "hm"}, CONVERSATION[1]]
    assert f"[assistant]{answer}[user]" in render(ANSWERS + shown + "{%- endfor %}", messages)

    parts = [{"type": "text", "text": answer}, {"type": "text", "text": " More."}]
    in_parts = [CONVERSATION[1], {"role": "assistant", "content": parts, "reasoning_content": "hm"}, CONVERSATION[1]]
    joined = "{%- set c = c if c is string else c | map(attribute='text') | join %}"
    assert f"[assistant]{answer} More.[user]" in render(ANSWERS + joined + shown + "{%- endfor %}", in_parts)


@pytest.mark.parametrize(
    "delimiters", ["\ufdd0\ufdd1", "\ufdd0\ufdd0", "\ufdd1\ufdd1", "".join(map(chr, range(0xFDD0, 0xFDF0)))]
)
@pytest.mark.parametrize("place", ["answer", "question", "tool"])
def test_no_text_is_taken_for_the_mark_of_a_quoted_marker(delimiters: str, place: str) -> None:
    marks = "".join(f"{delimiters[:-1]}{number}{delimiters[-1:]}" for number in range(3))
    answer = f"Before</think>it{marks if place == 'answer' else ''}, and</think>behind."
    question = {"role": "user", "content": marks if place == "question" else "q"}
    tool = {"type": "function", "function": {"name": "f", "description": marks if place == "tool" else "d"}}
    template = "{%- for t in tools or [] %}{{- t.function.name + t.function.description }}{%- endfor %}" + SPLITS
    template = template.replace("ARGUMENTS", "(c.function.arguments | tojson)")
    text = render(template, [question, {"role": "assistant", "content": answer}, question], tools=[tool])

    said = question["content"]
    assert text == f"f{tool['function']['description']}[user]{said}[assistant]{answer}[user]{said}"


def test_reasoning_with_which_an_answer_begins_is_the_templates_business() -> None:
    own = {"role": "assistant", "content": "<think>\nthought\n</think>\n\nSaid </think> twice."}
    text = render(SPLITS, [CONVERSATION[1], own, CONVERSATION[1]])
    assert text == "[user]weather?[assistant]\n\nSaid </think> twice.[user]weather?"

    opened = {"role": "assistant", "content": "<think>\nthought"}
    template = ANSWERS + (
        "{{- '[reasons]' if '<think>' in c }}{{- c if loop.last else c.replace('<think>', '') }}{%- endfor %}"
    )
    text = render(template, [CONVERSATION[1], opened], continue_final=True)
    assert text.endswith("[assistant][reasons]<think>\nthought")


@pytest.mark.parametrize(
    "template",
    [
        "{{- (tools or []) | length }}" + SPLITS.replace(CALLS, ""),  # drops calls, which are written into the content
        SPLITS.replace("ARGUMENTS", "(c.function.arguments | tojson).split('</think>')[-1]"),
        SPLITS.replace("ARGUMENTS", "(c.function.arguments | string).split('</think>')[-1]"),
        PLAIN.replace("(m.content or '')", "(m.content or '').split('</think>')[-1]"),  # without tools
    ],
)
def test_a_call_whose_arguments_quote_a_marker_of_the_template_is_rendered_whole(template: str) -> None:
    arguments = {"city": "Oslo </think> or", "k </think> y": ["deep </think> in"]}
    calls = [{**CONVERSATION[2]["tool_calls"][0], "function": {"name": "get_weather", "arguments": arguments}}]
    messages = [*CONVERSATION[:2], {**CONVERSATION[2], "tool_calls": calls}, CONVERSATION[3], CONVERSATION[1]]
    text = render(template, messages, tools=[WEATHER])
    assert '{"city": "Oslo </think> or", "k </think> y": ["deep </think> in"]}' in text


def test_what_a_template_does_with_markers_that_it_keeps_is_left_to_it() -> None:
    members = (
        "{%- for k, v in c.function.arguments.items() %}{{- k + '=' + ('<![CDATA[' + v + ']]>' if '<' in v else v) }}"
    )
    calls = "{%- for c in m.tool_calls or [] %}{{- c.function.name + ':' }}" + members + "{%- endfor %}{%- endfor %}"
    template = TOOLS + calls + "{%- endfor %}"
    function = {"name": "get_weather", "arguments": {"city": "<b>"}}
    messages = [*CONVERSATION[:2], {**CONVERSATION[2], "tool_calls": [{"id": "call_abc", "function": function}]}]
    assert render(template, messages, tools=[WEATHER]).endswith("[assistant]get_weather:city=<![CDATA[<b>]]>")


def test_a_switch_in_a_users_message_is_left_to_the_template_but_not_a_marker_with_the_same_letters() -> None:
    template = (
        "{%- for m in messages %}{{- '[' + m.role + ']' + (m.content or '').replace('/think', '') }}{%- endfor %}"
    )
    assert render(template, [{"role": "user", "content": "a </think> b /think"}]) == "[user]a </think> b "
