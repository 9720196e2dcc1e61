"""A template renders as it does in transformers, may change its own lists, and reaches nothing outside of the chat."""

import copy
from contextlib import suppress
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from protocol.to_worker import ChatPrompt
from tests.worker.prompt.test_templates import CONVERSATION, WEATHER, Tokenizer
from worker.prompt.chat_template import REFUSALS, ChatTemplate

CHAT: list[dict[str, Any]] = [*CONVERSATION, {"role": "assistant", "content": "Sunny.  "}]


def rendered(template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    prompt = ChatPrompt(messages, [WEATHER], **fields)
    return ChatTemplate(Tokenizer(template)).render(messages, [WEATHER], prompt, opens=True, has_tools=True)


FEATURES = {
    "blocks": "{% if true %}\n  a\n  {% endif %}\n{{- ' c ' -}} d\n{% for m in messages %}\n{{ m.role }}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "JSON": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ {'b': 'ü<', 'a': [1.5]} | tojson(sort_keys=true) }}",
    "tag of answers": "{% set x = 1 %}{% generation %}{{ messages }}{% set x = 2 %}{% endgeneration %}{{ x }}",
    "functions": "{{ dict(a=1, b=2).a }}{{ namespace(self=3).self }}{{ range(3) | list }}{{ strftime_now('%Y') }}",
    "names": "{{ documents is none }}{{ tools[0].function.name }}{{ add_generation_prompt }}{{ missing is defined }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "macro": "{% macro show(m) %}<{{ m.role }}>{{ caller() if caller }}{% endmacro %}{{ show(messages[0]) }}",
}


@pytest.mark.parametrize("template", FEATURES.values(), ids=FEATURES)
def test_a_template_renders_as_in_transformers(template: str) -> None:
    [expected], _ = render_jinja_template(
        conversations=[CHAT], tools=[WEATHER], chat_template=template, add_generation_prompt=True
    )
    assert rendered(template, CHAT) == expected


@pytest.mark.parametrize("content", ["[{}]", "[{}]|after", " {} ", "{}<|end|>\n"])
@pytest.mark.parametrize("text", ["Sunny", "Sunny.  ", "Sunny.\n", "a <b> c"])
def test_an_answer_is_continued_where_its_text_ends(content: str, text: str) -> None:
    before, after = content.split("{}")
    template = f"{{%- for m in messages %}}{{{{- '{before}' + m.content + '{after}' }}}}{{%- endfor %}}".replace(
        "\n", "\\n"
    )
    messages = [*CHAT[:2], {"role": "assistant", "content": text}]
    [expected], _ = render_jinja_template(conversations=[messages], chat_template=template, continue_final_message=True)
    assert rendered(template, messages, continue_final=True) == expected


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": []}, {"role": "user", "content": 5}])
def test_a_message_without_a_text_cannot_be_continued(message: dict[str, Any]) -> None:
    with pytest.raises(REFUSALS):
        rendered("{{ messages[-1].content }}", [message], continue_final=True)


def test_a_continued_text_that_the_template_drops_is_an_error() -> None:
    with pytest.raises(ValueError, match="the end of the message"):
        rendered("{{ messages[0].content }}", CHAT, continue_final=True)


# Kimi K2's way: ids wait in a list for their results.
QUEUE = (
    "{%- set queue = namespace(ids=[]) %}{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
    "{%- set _ = queue.ids.append(c.function.name + ':' ~ loop.index0) %}<{{ queue.ids[-1] }}>{%- endfor %}"
    "{%- if m.role == 'tool' %}({{ queue.ids.pop(0) }}){%- endif %}{%- endfor %}"
)


def test_a_template_may_change_the_lists_that_it_makes() -> None:
    assert rendered(QUEUE, CHAT) == "<get_weather:0>(get_weather:0)"


@pytest.mark.parametrize(
    "template",
    [
        "{%- set _ = messages.pop(0) %}{{ messages | length }}",
        "{%- set _ = messages[0].update(content='changed') %}{{ messages[0].content }}",
        "{%- set _ = messages[2].tool_calls[0].function.arguments.clear() %}{{ messages[2] | tojson }}",
        "{%- set _ = tools.append(1) %}{{ tools | length }}",
        "{%- set _ = tools[0].function.parameters.update(type='array') %}{{ tools | tojson }}",
        "{%- set _ = given.append(1) %}{{ given | length }}",
    ],
)
def test_no_template_changes_the_messages_tools_or_options_of_a_client(template: str) -> None:
    messages, tools, options = copy.deepcopy(CHAT), [copy.deepcopy(WEATHER)], {"given": [0]}
    before = copy.deepcopy((messages, tools, options))
    chat_template = ChatTemplate(Tokenizer(template))
    prompt = ChatPrompt(messages, tools, template_kwargs=options)
    first, second = (chat_template.render(messages, tools, prompt, opens=True, has_tools=True) for _ in range(2))

    assert first == second
    assert (messages, tools, options) == before


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "[].append.__self__.__class__",
        "messages.append.__globals__",
        "messages.__class__.__base__.__subclasses__()",
        "(messages | attr('__class__')).__name__",
        "messages['__class__'].__name__",
        "'{0.__class__}'.format(messages)",
        "'{a.__class__.__name__}'.format_map({'a': messages})",
        "namespace(__class__=1)",
        "namespace.__init__.__globals__",
        "namespace(a=1).__init__.__globals__",
        "dict.__globals__",
        "tojson.__globals__.os",
        "raise_exception.__globals__['json']",
        "strftime_now.__globals__",
        "cycler.__init__.__globals__.os",
        "joiner.__init__.__globals__",
        "lipsum.__globals__['os'].popen('true').read()",
        "self.__init__.__globals__",
        "range.__self__",
        "(messages | map(attribute='__class__') | list)[0].mro()",
        "messages.sort(key=lipsum.__globals__)",
    ],
)
def test_a_template_reaches_nothing_but_the_chat(expression: str) -> None:
    # An attribute that a template must not see is undefined, and undefined values are rendered as nothing.
    with suppress(TemplateError):
        assert rendered(f"{{{{ {expression} }}}}", CHAT) == ""


def test_a_namespace_takes_no_names_of_python() -> None:
    with pytest.raises(TemplateError):
        rendered("{% set ns = namespace(a=1) %}{% set ns.__class__ = 2 %}{{ ns.a }}", CHAT)


def test_a_range_in_a_template_has_an_end() -> None:
    with pytest.raises(REFUSALS):
        rendered("{{ range(10000000) | list }}", CHAT)
