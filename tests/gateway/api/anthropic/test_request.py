"""Anthropic's requests, lowered: what becomes of each block, field and habit of its clients."""

import json
from typing import Any

import pytest

from gateway.api.anthropic.request import decode_count, decode_messages, lower_messages, lower_prompt
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.errors import BadRequest
from protocol.to_worker import ChatPrompt, ConstraintKind, Generate

TOOL = {"name": "ls", "description": "List.", "input_schema": {"type": "object", "properties": {"path": {}}}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.258; cc_entrypoint=cli;"


def body(*messages: Any, **fields: Any) -> bytes:
    turns = list(messages) or [{"role": "user", "content": "hi"}]
    return json.dumps({"model": "m", "max_tokens": 5, "messages": turns, **fields}).encode()


def lowered(*messages: Any, model: ModelConfig | None = None, **fields: Any) -> Generate:
    request, _ = decode_messages(body(*messages, **fields))
    return lower_messages(request, model or ModelConfig(name="m", path="m"), lambda: 7, seed=1)


def prompt(*messages: Any, **fields: Any) -> ChatPrompt:
    made = lowered(*messages, **fields).prompt
    assert isinstance(made, ChatPrompt)
    return made


def turns(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return prompt(*messages, **fields).messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def refused(*messages: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        lowered(*messages, **fields)
    return caught.value


# -- system ----------------------------------------------------------------------------------------------------------


def test_a_system_array_and_a_system_string_are_one_prompt() -> None:
    as_string = turns(system="a\n\nb")
    as_array = turns(system=[text("a", cache_control={"type": "ephemeral"}), text("b")])

    assert as_string == as_array == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "system",
    [
        [text(BILLING), text("You are.")],
        [text(f"{BILLING}\nYou are.")],
        f"{BILLING}\n\nYou are.",
        "You are.",
    ],
)
def test_what_differs_between_sessions_is_left_out_of_the_prompt(system: Any) -> None:
    assert turns(system=system)[0] == {"role": "system", "content": "You are."}


@pytest.mark.parametrize("system", [None, "", [], BILLING, [text(BILLING)]])
def test_a_system_prompt_of_nothing_is_no_turn(system: Any) -> None:
    assert turns(system=system) == [{"role": "user", "content": "hi"}]


def test_a_system_message_amid_the_conversation_is_the_same_as_list_and_as_string() -> None:
    listed = {"role": "system", "content": [text("note", cache_control={"type": "ephemeral"})]}
    plain = {"role": "system", "content": "note"}
    hi = {"role": "user", "content": "hi"}

    assert turns(hi, listed, hi) == turns(hi, plain, hi) == [hi, plain, hi]


def test_cache_control_changes_nothing() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    call = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("a.txt")]}

    def conversation(mark: dict[str, Any]) -> ChatPrompt:
        marked = [text("ok", **mark), {**call, **mark}]
        answer = {**result, **mark, "content": [text("a.txt", **mark)]}
        messages = [user(text("list", **mark)), {"role": "assistant", "content": marked}, user(answer)]
        return prompt(*messages, system=[text("s", **mark)], tools=[{**TOOL, **mark}], **mark)

    assert conversation(mark) == conversation({})


# -- blocks ----------------------------------------------------------------------------------------------------------


def test_a_tool_round_trip_becomes_a_call_and_its_result() -> None:
    history = turns(
        user(text("list")),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                text("Listing."),
                {"type": "tool_use", "id": "t1", "name": "ls", "input": {"path": "."}},
            ],
        },
        user({"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}, text("and now?")),
    )

    assert history[1]["content"] == "Listing."
    assert history[1]["reasoning_content"] == "hm"
    assert history[1]["tool_calls"] == [
        {"id": "t1", "type": "function", "function": {"name": "ls", "arguments": {"path": "."}}}
    ]
    assert history[2] == {"role": "tool", "tool_call_id": "t1", "content": "a.txt", "name": "ls"}
    assert history[3] == {"role": "user", "content": "and now?"}


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"content": "plain"}, "plain"),
        ({"content": [text("one"), text("two")]}, "one\n\ntwo"),
        ({"content": []}, ""),
        ({}, ""),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": [{"type": "tool_reference", "tool_name": "grep"}]}, "Tool available: grep"),
    ],
)
def test_every_form_of_a_tool_result(fields: dict[str, Any], content: str) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "ls", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", **fields}
    history = turns(user(text("x")), {"role": "assistant", "content": [call]}, user(result))

    assert history[-1] == {"role": "tool", "tool_call_id": "t1", "content": content, "name": "ls"}


def test_results_of_parallel_calls_keep_their_order() -> None:
    calls = [{"type": "tool_use", "id": name, "name": name, "input": {}} for name in "ab"]
    results = [{"type": "tool_result", "tool_use_id": name, "content": name * 2} for name in "ab"]
    history = turns(user(text("x")), {"role": "assistant", "content": calls}, user(*results))

    assert [(turn["name"], turn["content"]) for turn in history[2:]] == [("a", "aa"), ("b", "bb")]


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0xLjEK"}


def document(source: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


def test_a_document_of_text_is_its_title_context_and_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    assert turns(user(document(source)))[0]["content"] == "body"
    assert turns(user(document(source, title="t", citations={"enabled": False})))[0]["content"] == "t\nbody"
    assert turns(user(document(source, title="t", context="c")))[0]["content"] == "t\nc\nbody"


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "Bern is nice."}, "T\nBern is nice."),
        ({"type": "content", "content": "Bern is nice."}, "T\nBern is nice."),
        ({"type": "content", "content": [text("Bern"), text("is nice.")]}, "T\n\nBern\n\nis nice."),
    ],
)
def test_a_document_of_text_is_shown_also_in_the_result_of_a_tool(source: Any, shown: str) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [document(source, title="T")]}

    assert turns(user(document(source, title="T"), text("Hi")))[0]["content"] == f"{shown}\n\nHi"
    history = turns(user(text("x")), {"role": "assistant", "content": [call]}, user(result))
    assert history[2]["content"] == shown


def test_a_document_of_blocks_is_their_texts_and_images() -> None:
    assert turns(user(document({"type": "content", "content": "body"}, title="t")))[0]["content"] == "t\nbody"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    inside = {"type": "content", "content": [text("a"), image, text("b")]}
    made = prompt(user(document(inside, title="t")))
    assert made.messages[0]["content"] == [
        {"type": "text", "text": "t\n\na"}, {"type": "image", "media": 0}, {"type": "text", "text": "b"},
    ]  # fmt: skip
    assert made.media[0].param == "messages.0.content.0.source.content.1"


@pytest.mark.parametrize(
    ("block", "word"),
    [
        (document(PDF, citations={"enabled": True}), "citations are not supported"),
        ({"type": "search_result", "source": "s", "title": "t", "content": [], "citations": {"enabled": True}},
         "citations are not supported"),
        (document({"type": "file", "file_id": "f"}), "no uploaded files"),
        (document({"type": "base64"}), "a document's source"),
        (document(None), "a document's source"),
        (document({"type": "content", "content": [{"text": "x"}]}), "type"),
        (document({"type": "content", "content": [document(PDF)]}), "text and image only"),
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_shown_is_refused(block: dict[str, Any], word: str) -> None:
    for place in (user(block), user({"type": "tool_result", "content": [block]})):
        error = refused(place)
        assert word in error.message
        assert (error.param or "").startswith("messages.0.content.0")


def test_the_citations_of_an_earlier_answer_are_taken() -> None:
    answered = {"role": "assistant", "content": [{**text("x"), "citations": []}, {**text("y"), "citations": None}]}
    assert turns(user(text("a")), answered, user(text("b")))[1]["content"] == "x\n\ny"


def test_a_search_result_is_its_title_source_and_text() -> None:
    found = {"type": "search_result", "source": "https://x", "title": "t", "content": [text("body")]}

    assert turns(user(found))[0]["content"] == "t\nhttps://x\nbody"


def test_what_another_server_did_is_passed_over() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {"type": "web_fetch_result"}},
        {"type": "whatever_comes_next", "payload": {}},
        text("found"),
    ]
    history = turns(user(text("x")), {"role": "assistant", "content": blocks}, user(text("y")))

    assert history[1] == {"role": "assistant", "content": "found"}


def test_unknown_roles_are_refused() -> None:
    assert refused({"role": "tool", "content": "x"}).param == "messages.0.role"


# -- the beginning of an answer --------------------------------------------------------------------------------------


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    made = prompt({"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is ("})

    assert made.continue_final
    assert made.messages[-1]["content"] == "The answer is ("


@pytest.mark.parametrize("content", ["", [], [text("")]])
def test_an_empty_last_turn_of_the_assistant_is_none(content: Any) -> None:
    made = prompt({"role": "user", "content": "hi"}, {"role": "assistant", "content": content})

    assert not made.continue_final
    assert made.messages == [{"role": "user", "content": "hi"}]


def test_a_conversation_of_nothing_is_refused() -> None:
    assert refused({"role": "assistant", "content": ""}).param == "messages"


def test_a_call_without_its_result_is_not_continued() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "ls", "input": {}}

    assert not prompt(user(text("x")), {"role": "assistant", "content": [call]}).continue_final


# -- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "custom"}])
def test_a_tool_is_shown_in_the_templates_shape(kind: dict[str, Any]) -> None:
    [tool] = prompt(tools=[{**TOOL, **kind, "defer_loading": False}]).tools

    assert tool["function"] == {"name": "ls", "description": "List.", "parameters": TOOL["input_schema"]}


def test_tools_of_anthropics_servers_are_left_out_and_named() -> None:
    request, unknown = decode_messages(body(tools=[{"type": "web_search_20250305", "name": "web_search"}, TOOL]))

    assert [tool["function"]["name"] for tool in lower_prompt(request)[0].tools] == ["ls"]
    assert unknown == ["tools.web_search_20250305"]


def names(*messages: Any, tools: list[Any], **fields: Any) -> list[str]:
    return [tool["function"]["name"] for tool in prompt(*messages, tools=tools, **fields).tools]


def test_tools_that_wait_to_be_found_are_shown_once_they_are_after_all_others() -> None:
    tools = [
        {**TOOL, "name": name, "defer_loading": name in ("a", "b", "c")} for name in ("a", "b", "c", "d", "search")
    ]
    call = {"type": "tool_use", "id": "t1", "name": "search", "input": {}}
    references = [{"type": "tool_reference", "tool_name": name} for name in ("c", "b", "gone")]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": references}
    history = [user(text("x")), {"role": "assistant", "content": [call]}, user(result)]

    assert names(tools=tools) == ["d", "search"]
    assert names(*history, tools=tools) == ["d", "search", "c", "b"]
    assert names(tools=tools, tool_choice={"type": "tool", "name": "a"}) == ["d", "search", "a"]


def test_every_tool_is_shown_where_only_anthropics_servers_could_find_it() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search"}

    assert names(tools=[{**TOOL, "defer_loading": True}, search]) == ["ls"]


def test_a_system_message_that_tells_of_tools_says_its_text_only() -> None:
    told = {"role": "system", "content": [text("note"), {"type": "tool_addition", "tool": {"name": "x"}}]}

    assert turns({"role": "user", "content": "hi"}, told)[1] == {"role": "system", "content": "note"}


def test_no_tool_is_shown_when_none_may_be_called() -> None:
    assert prompt(tools=[TOOL], tool_choice={"type": "none"}).tools == []


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "any"},
        {"type": "tool", "name": "ls"},
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "auto", "name": None, "disable_parallel_tool_use": None},
    ],
)
def test_every_choice_of_tools_is_taken(choice: dict[str, Any]) -> None:
    assert len(prompt(tools=[TOOL], tool_choice=choice).tools) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rm"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool"}},
        {"tools": [TOOL], "tool_choice": {"type": "maybe"}},
        {"tool_choice": {"type": "any"}},
        {"tools": [{"input_schema": {}}]},
    ],
)
def test_tools_that_cannot_be_are_refused(fields: dict[str, Any]) -> None:
    assert refused(**fields).status == 400


# -- thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "thinking", "effort", "budget"),
    [
        ({}, False, "", None),
        ({"thinking": {"type": "disabled"}}, False, "", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048, "display": "summarized"}}, True, "", 2048),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, None, "", None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, None, "high", None),
        ({"thinking": {"type": "enabled"}, "output_config": {"effort": "max"}}, True, "high", None),
        ({"output_config": {"effort": "low"}}, False, "low", None),
    ],
)
def test_every_wish_for_thinking(
    fields: dict[str, Any], thinking: bool | None, effort: str, budget: int | None
) -> None:
    made = lowered(**fields)
    assert isinstance(made.prompt, ChatPrompt)

    assert (made.prompt.thinking, made.prompt.effort, made.thinking_budget) == (thinking, effort, budget)


@pytest.mark.parametrize("fields", [{"thinking": {"type": "deep"}}, {"output_config": {"effort": "heroic"}}])
def test_unknown_ways_to_think_are_refused(fields: dict[str, Any]) -> None:
    assert refused(**fields).status == 400


# -- sampling and the rest -------------------------------------------------------------------------------------------


def test_sampling_is_the_requests_then_the_models_then_anthropics() -> None:
    model = ModelConfig(name="m", path="m", sampling=SamplingDefaults(temperature=0.3, top_k=20))
    made = lowered(model=model, temperature=0.0, top_p=0.5).sampling

    assert (made.temperature, made.top_p, made.top_k) == (0.0, 0.5, 20)
    assert lowered().sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("stops", "param"),
    [(["x"] * 17, "stop_sequences"), (["x", "y" * 1025], "stop_sequences[1]")],
)
def test_stop_sequences_are_bounded(stops: list[str], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        lowered(stop_sequences=stops)
    assert caught.value.param == param
    assert lowered(stop_sequences=["x" * 1024] * 16).stop == ("x" * 1024,) * 16


def test_stop_sequences_and_max_tokens_are_kept() -> None:
    made = lowered(stop_sequences=["END", ""], stream=True)

    assert (made.stop, made.max_tokens, made.want_progress) == (("END",), 5, True)


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_a_format_of_the_answer_is_a_constraint(field: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    made = lowered(**{field: wanted if field == "output_format" else {"format": wanted}}).constraint

    assert made is not None
    assert (made.kind, made.text) == (ConstraintKind.JSON_SCHEMA, '{"type":"object"}')


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_tokens": None}, {"messages": []}, {"temperature": 2}])
def test_bad_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        decode_messages(body(**fields))


def test_unknown_fields_are_named_and_those_that_ask_for_nothing_are_not() -> None:
    known = {
        "metadata": {"user_id": "{}"},
        "safeguards": [],
        "service_tier": "auto",
    }
    _, unknown = decode_messages(body(**known, speed="fast"))

    assert unknown == ["speed"]


def test_a_whole_request_can_be_counted() -> None:
    whole = body(system="s", tools=[TOOL], stream=True, metadata={}, stop_sequences=["x"], speed="fast")
    counted, unknown = decode_count(whole)

    assert lower_prompt(counted)[0] == lower_prompt(decode_messages(whole)[0])[0]
    assert unknown == ["speed"]
