"""Answers in a form: ten schemas, and tools with a template that has none and with one in Hermes' form."""

import json
from typing import Any

import jsonschema
import pytest

from tests.real.dialects import CHAT
from tests.real.figures import Figures
from tests.real.prepare import SMOLLM2
from tests.real.serving import Served

pytestmark = pytest.mark.soak
# The model's own turns, and tools as Hermes and Qwen write them.
HERMES = (
    "{% if tools %}<|im_start|>system\nYou may call functions. They are in <tools></tools>:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\nFor each call return a JSON object with name "
    'and arguments in <tool_call></tool_call>:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'
    "<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODELS = {
    "m": f'path = "{SMOLLM2}"',
    "hermes": f"path = \"{SMOLLM2}\"\nchat_template = '''{HERMES}'''",
}


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


NAME = {"type": "string", "maxLength": 24}
SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "flat object": (an_object(name=NAME, age={"type": "integer"}), "Invent a person."),
    "nested object": (an_object(city=an_object(name=NAME, country=NAME)), "Name a city."),
    "array with bounds": (
        an_object(fruits={"type": "array", "items": NAME, "minItems": 2, "maxItems": 3}),
        "Name fruits.",
    ),
    "enum": (an_object(mood={"enum": ["good", "bad", "unclear"]}), "Is 'I love it' good or bad?"),
    "union": (an_object(value={"anyOf": [{"type": "integer"}, {"type": "null"}]}), "How many legs has a dog?"),
    "constant": (an_object(kind={"const": "report"}, title=NAME), "Invent a title."),
    "numbers with bounds": (an_object(grade={"type": "integer", "minimum": 1, "maximum": 6}), "Give a grade."),
    "pattern": (an_object(date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}), "When was it?"),
    "booleans": (an_object(true={"type": "boolean"}, sure={"type": "boolean"}), "Is the sky blue?"),
    "reference": (
        an_object(first={"$ref": "#/$defs/p"}, second={"$ref": "#/$defs/p"})
        | {"$defs": {"p": an_object(x={"type": "integer", "minimum": 0, "maximum": 9})}},
        "Name two points.",
    ),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": an_object(city=NAME),
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": an_object()}}
ASKED = "What is the weather in Paris? Use the function."


@pytest.mark.parametrize("shape", SCHEMAS)
def test_an_answer_is_valid_for_its_schema(served: Served, shape: str) -> None:
    schema, prompt = SCHEMAS[shape]
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    text = CHAT.whole(served, "m", prompt, 120, response_format=wanted)

    jsonschema.validate(json.loads(text), schema)


def test_a_streamed_answer_with_a_schema_is_the_whole_one(served: Served) -> None:
    schema, prompt = SCHEMAS["nested object"]
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}

    whole, streamed = (asked(served, "m", prompt, 120, response_format=wanted) for asked in (CHAT.whole, CHAT.streamed))
    assert streamed == whole


def calls(served: Served, model: str, **options: Any) -> list[dict[str, Any]]:
    answered = CHAT.ask(served, model, ASKED, 80, tools=[WEATHER, TIME], **options)
    return [call["function"] for call in answered["choices"][0]["message"].get("tool_calls") or []]


@pytest.mark.parametrize("model", MODELS)
def test_a_named_tool_is_called_with_valid_arguments(served: Served, model: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    (call,) = calls(served, model, tool_choice=named)

    assert call["name"] == "get_weather"
    jsonschema.validate(json.loads(call["arguments"]), WEATHER["function"]["parameters"])


@pytest.mark.parametrize("model", MODELS)
def test_a_required_tool_is_called(served: Served, model: str) -> None:
    called = calls(served, model, tool_choice="required", parallel_tool_calls=False)

    assert [call["name"] for call in called] in (["get_weather"], ["get_time"])


@pytest.mark.parametrize("model", MODELS)
def test_a_free_choice_of_tools_leaves_no_mark_in_the_text(served: Served, figures: Figures, model: str) -> None:
    answered = CHAT.ask(served, model, ASKED, 80, tools=[WEATHER, TIME])
    message = answered["choices"][0]["message"]

    called = [call["function"]["name"] for call in message.get("tool_calls") or []]
    figures.note(f"free choice of tools, {model}", ", ".join(called) or "a text")
    assert "<tool_call>" not in (message["content"] or "")


def test_the_result_of_a_tool_is_read(served: Served) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is raining in Paris, 9 degrees."},
    ]
    body = {"model": "m", "messages": messages, "tools": [WEATHER], "max_tokens": 32, "temperature": 0}
    answered = served.post("/v1/chat/completions", body)

    assert "rain" in answered["choices"][0]["message"]["content"].lower()
