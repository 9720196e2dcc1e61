"""Other people's templates, as clients' requests reach them: nothing of a conversation is lost or refused.

`MLXD_PARSER_DATA` names a folder with `chat_templates/*.jinja`; see tests/worker/output/parsers/test_external.py.
"""

import itertools
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.api.openai.lowering import lower_chat
from gateway.api.openai.request import decode_chat
from gateway.config.settings import ModelConfig
from protocol.checkpoint import ChatTemplates
from protocol.to_worker import ChatPrompt, Media
from tests.worker.output.parsers.replay import Case, calls_of, replay
from tests.worker.prompt.test_templates import Tokenizer
from tests.worker.prompt.test_turn_repairs import conversation
from worker.output.parsers.families import start_in_reasoning
from worker.prompt.family import calling_family
from worker.prompt.templates import Renderer
from worker.vision.media import MediaMarkers

DATA = os.environ.get("MLXD_PARSER_DATA", "")
pytestmark = pytest.mark.skipif(not DATA, reason="MLXD_PARSER_DATA is not set")
TEMPLATES = sorted((Path(DATA) / "chat_templates").glob("*.jinja")) if DATA else []

PROPERTIES = {"city": {"type": "string", "description": "Where"}, "days": {"type": ["integer", "null"]}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "Tells the time."}},
]
SYSTEM, USER = {"role": "system", "content": "SYSTEM-WORDS"}, {"role": "user", "content": "QUESTION-1"}
NEXT = [{"role": "assistant", "content": "ANSWER-1"}, {"role": "user", "content": "QUESTION-2"}]


def called(*calls: tuple[str, str], **fields: Any) -> list[dict[str, Any]]:
    """A turn of calls and what they gave."""
    ids = [f"call_{n}" for n in range(len(calls))]
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, calls, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": call_id, "content": f"RESULT-{n}"} for n, call_id in enumerate(ids)]
    return [{"role": "assistant", "content": None, "tool_calls": made, **fields}, *results]


OSLO, NOW = ("get_weather", '{"city": "OSLO-ARGUMENT", "days": 3}'), ("now", "{}")
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a question": ([SYSTEM, USER], []),
    "a question with tools": ([SYSTEM, USER], TOOLS),
    "tools and nobody at the head": ([USER], TOOLS),
    "a result": ([SYSTEM, USER, *called(OSLO)], TOOLS),
    "results": ([SYSTEM, USER, *called(OSLO, NOW)], TOOLS),
    "results in parts": (
        [SYSTEM, USER, *called(OSLO)[:1], {"role": "tool", "tool_call_id": "call_0", "content": [
            {"type": "text", "text": "RESULT-0"}]}],
        TOOLS,
    ),
    "reasoning sent back": ([SYSTEM, USER, *called(OSLO, reasoning_content="thought"), *NEXT], TOOLS),
    "words in parts": ([SYSTEM, {"role": "user", "content": [{"type": "text", "text": "QUESTION-1"}]}], []),
    "a developer": ([{"role": "developer", "content": "DEVELOPER-WORDS"}, USER, *called(OSLO), *NEXT], TOOLS),
    "both": ([SYSTEM, {"role": "developer", "content": "DEVELOPER-WORDS"}, USER], TOOLS),
    "a late system": ([SYSTEM, USER, *NEXT[:1], {"role": "system", "content": "LATE-WORDS"}, *NEXT[1:]], []),
    "two questions": ([SYSTEM, USER, {"role": "user", "content": "QUESTION-2"}], []),
    "a system alone": ([SYSTEM], []),
    "results that nobody offers tools for": ([SYSTEM, USER, *called(OSLO), *NEXT], []),
    "calls of the old kind": (
        [SYSTEM, USER, {"role": "assistant", "content": None, "function_call": {
            "name": "get_weather", "arguments": OSLO[1]}},
         {"role": "function", "name": "get_weather", "content": "RESULT-0"}],
        TOOLS,
    ),
}  # fmt: skip


# Turns as clients with interrupted calls, trimmed histories and reminders send them; see `conversation`.
TURNS = (
    *("UCrU", "UTrUTrU", "UCU", "UPrU", "UPlr", "UPrUl", "UPU", "UCAr", "UT", "UC", "UTr", "UTrAU", "UDrAU", "UACrAU"),
    *("AU", "AUTrU", "UEU", "UNU", "UE", "UUAAU", "A", "C", "TrA", "CrAU", "o", "Uo", "oAU", "UoU", "UCro", "UPolr"),
)

# What must be in a prompt, wherever the template puts it.
WORD = re.compile(r"[A-Z]+-[A-Z0-9]+")


def prompt_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> ChatPrompt:
    """As the gateway sends it."""
    body = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})
    request, _ = decode_chat(msgspec.json.encode(body))
    [generate] = lower_chat(request, ModelConfig(name="m", path="m"), itertools.count(1).__next__, 0)
    assert isinstance(generate.prompt, ChatPrompt)
    return generate.prompt


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_takes_every_conversation_and_keeps_its_words(path: Path) -> None:
    tokenizer = Tokenizer(path.read_text(encoding="utf-8"))
    tokenizer.special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = Renderer(tokenizer)
    for name, (messages, tools) in CONVERSATIONS.items():
        text = renderer.render(prompt_of(messages, tools))
        for effort in ("low", "medium", "high"):
            assert renderer.render(msgspec.structs.replace(prompt_of(messages, tools), effort=effort))
        wanted = WORD.findall(msgspec.json.encode(messages).decode())
        wanted += ["get_weather", "Tells the weather.", "now", "Tells the time."] if tools else []
        assert [word for word in wanted if word not in text] == [], name


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_takes_turns_in_every_order_and_keeps_their_words(path: Path) -> None:
    tokenizer = Tokenizer(path.read_text(encoding="utf-8"))
    tokenizer.special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = Renderer(tokenizer)
    for letters, head, tools in itertools.product(TURNS, ("", "S"), (TOOLS, [])):
        messages = conversation(head + letters)
        text = renderer.render(prompt_of(messages, tools))
        wanted = WORD.findall(msgspec.json.encode(messages).decode()) + (["Tells the time."] if tools else [])
        assert [word for word in wanted if word not in text] == [], (head + letters, len(tools))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_parser_of_a_template_reads_the_calls_in_its_prompts(path: Path) -> None:
    templates = ChatTemplates.of(path.read_text(encoding="utf-8"))
    tokenizer = Tokenizer(templates.plain)
    tokenizer.special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer, family = Renderer(tokenizer), calling_family(templates)
    opened, closed = (
        renderer.render(prompt_of([SYSTEM, USER], TOOLS), opens_answer=opens_answer) for opens_answer in (True, False)
    )
    text = renderer.render(prompt_of([SYSTEM, USER, *called(OSLO, NOW), USER], TOOLS), opens_answer=False)
    # Mistral's tools stand before the last question.
    asked = text[: text.index("QUESTION-1") + len("QUESTION-1")]
    before = next(each for each in (opened, closed, asked) if text.startswith(each))
    [turn, _] = text.removeprefix(before).split("RESULT-0")
    events, malformed = replay(
        Case("", family, turn, "", "", [], TOOLS, start_in_reasoning=start_in_reasoning(family, before))
    )
    calls = [(call.name, msgspec.json.decode(call.arguments)) for call in calls_of(events)]

    assert malformed == 0
    # Some templates take one call a turn, with its result.
    assert calls in ([wanted := ("get_weather", msgspec.json.decode(OSLO[1])), ("now", {})], [wanted])


# Markers that templates look for in texts: they split a text there, remove the marker or refuse the text.
MARKERS = (
    *("<think>", "</think>", "</mm:think>", "<|channel>", "<channel|>", "[BEGIN FINAL RESPONSE]", "<tool_sep>"),
    *("</assistant>", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    *("<tool_response>", "</tool_response>"),
)  # fmt: skip


def quoting(marker: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """A conversation whose texts quote a marker, its tool, and the texts that must be in the prompt as they are."""
    texts = [
        f"{place}-1 {marker} {place}-2 {marker} {place}-3" for place in ("ANSWER", "WORDS", "VALUE", "NESTED", "NAME")
    ]
    answer, beside, value, nested, key = texts
    system, user, result, last = (f"{place}-1 {marker} {place}-2" for place in ("SYSTEM", "USER", "RESULT", "LAST"))
    call, told = called(("get_weather", msgspec.json.encode({"city": value, key: [nested]}).decode()))
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": answer, "reasoning_content": f"thought {marker} thought"},
        USER,
        {**call, "content": beside},
        {**told, "content": result},
        *NEXT,
        {"role": "assistant", "content": last},
        USER,
    ]
    return messages, TOOLS, [*texts, system, user, result, last]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_keeps_texts_that_quote_the_markers_of_templates(path: Path) -> None:
    tokenizer = Tokenizer(path.read_text(encoding="utf-8"))
    tokenizer.special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}
    renderer = Renderer(tokenizer)
    for marker in MARKERS:
        messages, tools, texts = quoting(marker)
        text = renderer.render(prompt_of(messages, tools))
        assert [each for each in texts if each not in text] == [], marker


# How the templates of models that take images mark one.
IMAGES = (
    "<|image_pad|>", "<image>", "[IMG]", "<|image|>", "<|media_pad|>", "<|patch|>", "<im_patch>", "<|IMG_PATCH|>",
    "]<]image[>[", "<start_of_image>",
)  # fmt: skip


def image_renderer(path: Path) -> Renderer | None:
    """None for a template that shows no image."""
    template = path.read_text(encoding="utf-8")
    tokenizer = Tokenizer(template)
    tokenizer.special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}
    renderers = (Renderer(tokenizer, MediaMarkers({"image": marker})) for marker in IMAGES if marker in template)
    return next((renderer for renderer in renderers if renderer.shown), None)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_keeps_the_images_of_questions_and_of_results_in_order(path: Path) -> None:
    renderer = image_renderer(path)
    if renderer is None:
        pytest.skip("shows no image")
    ask, *results = called(OSLO)
    shown = [{"type": "image", "media": index} for index in range(4)]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "QUESTION-1"}, shown[2], shown[0]]},
        ask,
        {**results[0], "name": "get_weather", "content": [{"type": "text", "text": "RESULT-0"}, shown[3]]},
        {"role": "assistant", "content": "ANSWER-1"},
        {"role": "user", "content": [shown[1], {"type": "text", "text": "QUESTION-2"}]},
    ]
    plain = prompt_of([SYSTEM, USER, ask, *results, *NEXT], TOOLS)
    calls = plain.messages[2]
    prompt = msgspec.structs.replace(
        plain, messages=[SYSTEM, messages[0], calls, *messages[2:]], media=(Media("image", b"", b""),) * 4
    )
    text, order = renderer.place(prompt)

    assert order == [2, 0, 3, 1]
    assert [word for word in WORD.findall(str(messages)) if word not in text] == []


def test_images_of_the_collected_models_are_known() -> None:
    assert len([path for path in TEMPLATES if image_renderer(path)]) >= 16
