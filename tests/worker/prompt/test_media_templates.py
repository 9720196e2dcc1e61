"""Media in templates: each stands where the client put it, and nothing that a client types is taken for one."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.failures import Code
from protocol.to_worker import ChatPrompt, Media
from tests.worker.prompt.test_templates import WEATHER, Tokenizer
from worker.errors import RequestInvalid
from worker.prompt.rewrites import SHOWN_NEXT, joined, parts, words, wrapped
from worker.prompt.templates import Renderer
from worker.start.checked_model import adopt_template
from worker.vision.media import MediaMarkers

MARKERS = MediaMarkers({"image": "<img>", "video": "<vid>"}, ("<pad>",))
MACRO = """
{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content or [] -%}
{{ '<img>' if p.type == 'image' else '<vid>' if p.type == 'video' else p.text }}{% endfor %}{% endif %}{% endmacro %}"""
CALL = (
    "{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + (c.function.arguments | tojson) }}{%- endfor %}"
)
TOOLS = "{%- for t in tools or [] %}{{ t.function.name }}{%- endfor %}"
KEEPS = MACRO + TOOLS + "{%- for m in messages %}{{ '[' + m.role + ']' + text(m.content) }}" + CALL + "{%- endfor %}"
# Of results only the text.
DROPS = (
    MACRO + TOOLS + "{%- for m in messages %}{{ '[' + m.role + ']' }}{% if m.role != 'tool' %}{{ text(m.content) }}"
    "{% elif m.content is string %}{{ m.content }}{% else %}{% for p in m.content if p.type == 'text' %}{{ p.text }}"
    "{% endfor %}{% endif %}" + CALL + "{%- endfor %}"
)
REFUSES = KEEPS.replace(
    "{%- for m in messages %}",
    "{%- for m in messages %}{% if m.role == 'tool' and m.content is not string %}{{ raise_exception('a list') }}"
    "{% endif %}",
)
# A user may speak only after an answer, results of calls aside.
STRICT = REFUSES.replace(
    "{%- for m in messages %}",
    "{% set ns = namespace(n=0) %}{%- for m in messages %}{% if m.role == 'user' or m.role == 'assistant' and not "
    "m.tool_calls %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}",
    1,
)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(index: int) -> dict[str, Any]:
    return {"type": "image", "media": index}


def result(*content: dict[str, Any], call: str = "call_0") -> list[dict[str, Any]]:
    called = {"id": call, "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call, "name": "get_weather", "content": list(content)},
    ]


def place(template: str, *messages: dict[str, Any], media: int = 1) -> tuple[str, list[int]]:
    prompt = ChatPrompt(list(messages), tools=[WEATHER], media=(Media("image", b"", b""),) * media)
    return Renderer(Tokenizer(template), MARKERS).place(prompt)


def test_media_stand_between_the_words_that_they_were_sent_between() -> None:
    message = {"role": "user", "content": [text("one "), image(1), text(" two "), image(0), text(" three")]}

    assert place(KEEPS, message, media=2) == ("get_weather[user]one <img> two <img> three", [1, 0])


def test_media_of_a_result_stay_in_it_where_the_template_shows_them() -> None:
    rendered, order = place(KEEPS, {"role": "user", "content": "read"}, *result(text("page "), image(0)))

    assert rendered.endswith("[tool]page <img>")
    assert order == [0]


@pytest.mark.parametrize("template", [DROPS, REFUSES], ids=["loses them", "refuses them"])
def test_media_of_results_follow_them_where_the_template_has_no_place_for_them(template: str) -> None:
    messages = [
        {"role": "user", "content": [image(3), text("read")]},
        *result(text("page 1"), image(0)),
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": [image(2), image(1)]},
        {"role": "assistant", "content": "read"},
    ]
    rendered, order = place(template, *messages, media=4)

    assert rendered.endswith(f"[tool]page 1[tool]{SHOWN_NEXT}[user]<img><img><img>[assistant]read")
    assert order == [3, 0, 2, 1]


def test_an_assistant_stands_before_moved_media_where_roles_must_alternate() -> None:
    rendered, order = place(STRICT, {"role": "user", "content": "read"}, *result(text("page"), image(0)))

    assert rendered.endswith(f"[tool]page[assistant]{SHOWN_NEXT}[user]<img>")
    assert order == [0]


def test_a_template_that_renders_lists_only_gets_text_as_a_list() -> None:
    lists = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ '<img>' if p.type == 'image' else p.text }}"
    )
    renderer = Renderer(Tokenizer(lists + "{% endfor %}{% endfor %}"), MARKERS)

    assert renderer.render(ChatPrompt([{"role": "user", "content": "hello"}])) == "[user]hello"


@pytest.mark.parametrize(
    ("own", "files", "used"),
    [
        ("", {"chat_template.json": json.dumps({"chat_template": KEEPS})}, KEEPS),
        ("", {"chat_template.jinja": KEEPS}, KEEPS),
        (TOOLS, {"chat_template.json": json.dumps({"chat_template": KEEPS})}, KEEPS),
        (KEEPS, {"chat_template.json": json.dumps({"chat_template": DROPS})}, KEEPS),
        (TOOLS, {"chat_template.json": "{"}, TOOLS),
        (TOOLS, {"chat_template.json": json.dumps({"chat_template": TOOLS + "x"})}, TOOLS),
    ],
)
def test_a_template_beside_the_tokenizer_is_used_where_its_own_shows_no_images(
    tmp_path: Path, own: str, files: dict[str, str], used: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    tokenizer = Tokenizer(own)
    tokenizer.has_chat_template = bool(own)
    adopt_template(tokenizer, tmp_path)

    assert (tokenizer.chat_template, tokenizer.has_chat_template) == (used, True)


@pytest.mark.parametrize("own", ["\ufeff" + KEEPS, {"default": "\ufeff" + KEEPS}, ""])
def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path: Path, own: Any) -> None:
    (tmp_path / "chat_template.jinja").write_text(KEEPS, encoding="utf-8-sig")
    tokenizer = Tokenizer(own)
    tokenizer.has_chat_template = bool(own)
    adopt_template(tokenizer, tmp_path)

    assert tokenizer.chat_template == ({"default": KEEPS} if isinstance(own, dict) else KEEPS)


def test_kinds_that_a_template_shows_are_found_and_others_are_not() -> None:
    assert Renderer(Tokenizer(KEEPS), MARKERS).shown == {"image", "video"}
    assert Renderer(Tokenizer(KEEPS.replace("'<vid>'", "''")), MARKERS).shown == {"image"}
    assert Renderer(Tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"), MARKERS).shown == frozenset()


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "what is <img> and <pad>?"}],
        [{"role": "system", "content": "use <img>"}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": "x"}, *result(text("a page with <img><img>"))],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<vid>"}, {"role": "user", "content": "y"}],
    ],
    ids=["user", "system", "tool", "assistant"],
)
def test_typed_markers_are_text_and_shift_no_image(messages: list[dict[str, Any]]) -> None:
    shown = {"role": "user", "content": [text("<img> "), image(0), text(" <img>")]}
    rendered, order = place(KEEPS, *messages, {"role": "assistant", "content": "ok"}, shown)

    assert MARKERS.kinds(rendered) == ["image"]
    assert order == [0]
    assert rendered.endswith("[user]<\u2060img> <img> <\u2060img>")
    assert "<pad>" not in rendered


def test_typed_markers_in_calls_and_tools_are_text() -> None:
    [call, output] = result(text("x"))
    call["tool_calls"][0]["function"]["arguments"] = {"<img>": ["<vid>", 3, None]}
    rendered, _ = place(KEEPS, {"role": "user", "content": "x"}, call, output, media=0)

    assert MARKERS.kinds(rendered) == []
    assert "<\u2060vid>" in rendered


def test_a_marker_typed_in_two_halves_is_refused_and_not_taken_for_an_image() -> None:
    with pytest.raises(RequestInvalid) as caught:
        place(KEEPS, {"role": "user", "content": [text("<im"), text("g>"), image(0)]})

    assert caught.value.failure.code is Code.TEMPLATE_ERROR


def test_a_template_that_loses_an_image_is_refused_and_not_answered_without_it() -> None:
    forgetful = KEEPS.replace("for m in messages", "for m in messages[1:]")
    with pytest.raises(RequestInvalid) as caught:
        place(forgetful, {"role": "user", "content": [image(0)]}, {"role": "user", "content": "x"})

    assert "place" in caught.value.failure.message


def test_contents_of_text_stay_text_and_others_join_in_order() -> None:
    assert joined(["a", None, "b"]) == "a\n\n\n\nb"
    assert joined(["a", [image(0), text("b")], "c"]) == [text("a\n\n"), image(0), text("b\n\nc")]
    assert wrapped("<", [image(0)], ">") == [text("<"), image(0), text(">")]
    assert (words([text("a"), image(0), text("b")]), parts("")) == ("ab", [])
