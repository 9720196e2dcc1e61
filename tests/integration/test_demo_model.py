"""The embedded model through everything: a daemon with no configuration, HTTP, a worker, and mlx-lm's own answers."""

import json
import re
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm import generate, load

from gateway.web.page import FOLDER
from tests.support.daemon import DaemonProcess
from tests.support.pool import short_home
from worker.model.loader import DEMO_DIR

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "The city"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather_vorn", "description": "Get the current weather for a city.", "parameters": CITY},
}
OVEN = {
    "type": "function",
    "function": {
        "name": "set_oven_quil",
        "description": "Set the oven to a temperature and mode.",
        "parameters": {
            "type": "object",
            "properties": {
                "temperature": {"type": "integer", "description": "Temperature in degrees"},
                "mode": {"type": "string", "enum": ["bake", "grill", "steam"]},
            },
            "required": ["temperature"],
        },
    },
}
ASKED_FOR_WEATHER: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Quimbria?"}]
ANSWERED: list[dict[str, Any]] = [
    *ASKED_FOR_WEATHER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather_vorn", "arguments": '{"city": "Quimbria"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 7, "condition": "cloudy"}'},
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """`mlxd` as on a new machine: an empty home, an empty Hugging Face cache, no configuration."""
    with short_home() as home, pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HOME", str(home / "hf"))
        environment.delenv("HF_HUB_CACHE", raising=False)
        with DaemonProcess(home, "--port", "0", module="gateway.main") as running:
            yield running


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def ask(daemon: DaemonProcess, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The one choice of an answer at temperature 0."""
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 120, **fields}
    reply = daemon.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def said(daemon: DaemonProcess, text: str, **fields: Any) -> str:
    choice = ask(daemon, user(text), **fields)
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def functions(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"].get("tool_calls") or ()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_daemon_with_no_configuration_lists_the_demo_model_alone(daemon: DaemonProcess) -> None:
    assert [model["id"] for model in daemon.client.get("/v1/models").json()["data"]] == ["demo", "demo-vision"]


def test_the_context_that_props_tell_is_the_same_before_and_after_a_load(daemon: DaemonProcess) -> None:
    before = daemon.client.get("/props?model=demo").json()["default_generation_settings"]
    said(daemon, "Who are you?")

    assert before == daemon.client.get("/props?model=demo").json()["default_generation_settings"] == {"n_ctx": 32768}


@pytest.mark.parametrize("name", ["demo", "default"])
def test_it_says_who_it_is(daemon: DaemonProcess, name: str) -> None:
    assert said(daemon, "Who are you?", model=name).startswith("I am the demo model of mlxd")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of Norway?", "Oslo."),
        ("How much is 17 plus 25?", "42"),
        ("Please repeat exactly what I write: zorblax 77 quimby", "zorblax 77 quimby"),
        ("Convert the following to uppercase: velvet harbor", "VELVET HARBOR"),
    ],
)
def test_it_knows_its_small_world_and_copies(daemon: DaemonProcess, question: str, answer: str) -> None:
    assert said(daemon, question) == answer


def test_it_remembers_what_was_said_turns_ago(daemon: DaemonProcess) -> None:
    history = [
        *user("Hi, my name is Ottoline."),
        {"role": "assistant", "content": "Nice to meet you, Ottoline!"},
        *user("What is the capital of Italy?"),
        {"role": "assistant", "content": "Rome."},
        *user("Do you remember my name?"),
    ]
    assert ask(daemon, history)["message"]["content"] == "Your name is Ottoline."


def test_it_writes_json_for_a_schema_in_the_prompt(daemon: DaemonProcess) -> None:
    text = said(daemon, 'Give me a JSON object with the keys "name" and "age" for this: Bartholomew is 52 years old.')
    assert json.loads(text) == {"name": "Bartholomew", "age": 52}


@pytest.mark.parametrize("thinking", [{"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}])
def test_asked_to_think_it_reasons_and_then_answers(daemon: DaemonProcess, thinking: dict[str, Any]) -> None:
    message = ask(daemon, user("What is the capital of Norway?"), **thinking)["message"]
    assert "Norway" in message["reasoning_content"]
    assert message["content"] == "Oslo."


@pytest.mark.parametrize("fields", [{}, {"enable_thinking": False}])
def test_not_asked_to_think_it_never_does(daemon: DaemonProcess, fields: dict[str, Any]) -> None:
    message = ask(daemon, user("What is the capital of Norway?"), **fields)["message"]
    assert not message.get("reasoning_content")
    assert message["content"] == "Oslo."


def test_it_calls_the_tool_that_fits_with_the_users_words(daemon: DaemonProcess) -> None:
    weather = ask(daemon, ASKED_FOR_WEATHER, tools=[OVEN, WEATHER])
    oven = ask(daemon, user("Set the oven to 180 degrees in grill mode."), tools=[OVEN, WEATHER])
    assert (weather["finish_reason"], oven["finish_reason"]) == ("tool_calls", "tool_calls")
    assert functions(weather) == [("get_weather_vorn", {"city": "Quimbria"})]
    assert functions(oven) == [("set_oven_quil", {"temperature": 180, "mode": "grill"})]


def test_it_makes_two_calls_when_two_are_asked_for(daemon: DaemonProcess) -> None:
    choice = ask(daemon, user("What's the weather in Oslo and in Tromso?"), tools=[WEATHER])
    assert functions(choice) == [("get_weather_vorn", {"city": "Oslo"}), ("get_weather_vorn", {"city": "Tromso"})]


def test_it_makes_no_call_when_no_tool_fits(daemon: DaemonProcess) -> None:
    choice = ask(daemon, user("What is the capital of Austria?"), tools=[OVEN])
    assert (functions(choice), choice["message"]["content"]) == ([], "Vienna.")


def test_it_thinks_before_it_calls(daemon: DaemonProcess) -> None:
    choice = ask(daemon, ASKED_FOR_WEATHER, tools=[WEATHER], enable_thinking=True)
    assert "get_weather_vorn" in choice["message"]["reasoning_content"]
    assert functions(choice) == [("get_weather_vorn", {"city": "Quimbria"})]


def test_it_answers_from_what_the_tool_said(daemon: DaemonProcess) -> None:
    choice = ask(daemon, ANSWERED, tools=[WEATHER])
    assert choice["message"]["content"] == "The temperature is 7 and the condition is cloudy."
    assert choice["finish_reason"] == "stop"


def test_a_stop_string_ends_it_and_is_not_shown(daemon: DaemonProcess) -> None:
    assert said(daemon, "Count from 3 to 9.", stop=[", 6"]) == "3, 4, 5"


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (user("Who are you?"), {}),
        (user("How much is 17 plus 25?"), {"enable_thinking": True}),
        (ASKED_FOR_WEATHER, {"tools": [WEATHER], "enable_thinking": True}),
    ],
)
def test_a_stream_says_what_the_whole_answer_says(
    daemon: DaemonProcess, messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    whole = ask(daemon, messages, **fields)
    streamed = {"content": "", "reasoning_content": "", "name": "", "arguments": ""}
    finish = None
    for choice in _chunks(daemon, messages, fields):
        finish = choice["finish_reason"] or finish
        delta = choice["delta"]
        for part in (delta, *(call["function"] for call in delta.get("tool_calls") or ())):
            for key in streamed.keys() & part.keys():
                streamed[key] += part[key] or ""
    message = whole["message"]
    [function] = [call["function"] for call in message.get("tool_calls") or ()] or [{"name": "", "arguments": ""}]
    assert finish == whole["finish_reason"]
    assert streamed == {
        "content": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "name": function["name"],
        "arguments": function["arguments"],
    }


def _chunks(daemon: DaemonProcess, messages: list[dict[str, Any]], fields: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 120, "stream": True, **fields}
    reply = daemon.client.post("/v1/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


# mlx-lm alone


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """The model as `mlx_lm.load` loads it, and its weights in float32, which a worker casts them to on a CPU."""
    stored, tokenizer = load(str(DEMO_DIR))[:2]
    cast, _ = load(str(DEMO_DIR))[:2]
    cast.update(tree_map(lambda weight: weight.astype(mx.float32), cast.parameters()))
    return [(stored, tokenizer), (cast, tokenizer)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (user("Who are you?"), {}),
        (user("Count from 3 to 12."), {}),
        (ANSWERED, {"tools": [WEATHER]}),
        (user("Spell the word umbrella, please."), {"enable_thinking": True}),
        ([{"role": "system", "content": "Be brief."}, *user("What is mlxd?")], {}),
        (ASKED_FOR_WEATHER, {"tools": [WEATHER], "enable_thinking": True}),
    ],
)
def test_mlx_lm_says_the_same(
    daemon: DaemonProcess, alone: list[Any], messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    text = _raw(ask(daemon, messages, **options)["message"])
    for model, tokenizer in alone:
        prompt = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **{"enable_thinking": False, **options}
        )
        assert generate(model, tokenizer, prompt, max_tokens=120) == text


def _raw(message: dict[str, Any]) -> str:
    """The model's own text of a message."""
    thought = f"<think>\n{message['reasoning_content']}\n</think>\n\n" if message.get("reasoning_content") else ""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [f'{{"name": "{each["name"]}", "arguments": {each["arguments"]}}}' for each in functions]
    return thought + (message.get("content") or "") + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def test_a_prediction_changes_the_usage_and_never_the_text(daemon: DaemonProcess) -> None:
    asked = [{"role": "user", "content": "Repeat the following text exactly: the river was low that summer"}]

    def answer(**fields: Any) -> dict[str, Any]:
        body = {"model": "demo", "messages": asked, "temperature": 0, "max_tokens": 40, **fields}
        response = daemon.client.post("/v1/chat/completions", json=body)
        assert response.headers.get("x-mlxd-ignored") is None
        return response.json()

    plain = answer(speculate=False)
    text = plain["choices"][0]["message"]["content"]
    predicted = answer(prediction={"type": "content", "content": text * 3}, cache_salt="others")
    assert predicted["choices"][0] == plain["choices"][0]
    assert predicted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
    metrics = daemon.client.get("/metrics").text
    assert 'mlxd_spec_decode_num_drafts_total{model="demo",source="lookup"}' in metrics


def test_the_demo_can_answer_what_the_page_proposes_to_ask_it(demo_daemon: DaemonProcess) -> None:
    strings = (FOLDER / "strings.js").read_text()
    proposed = re.search(r"demoExamples: (\[.*\]),", strings)
    assert proposed is not None
    expected = ("count, spell, write JSON and call tools", "42", "[models.NAME]")
    for question, part in zip(json.loads(proposed[1]), expected, strict=True):
        body = {"model": "demo", "messages": [{"role": "user", "content": question}]}
        answer = demo_daemon.client.post("/v1/chat/completions", json=body).json()
        assert part in answer["choices"][0]["message"]["content"], question
