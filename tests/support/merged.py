"""Merging of a stream's events as a client does it, with checks of their order."""

import json
from typing import Any


def merge_chat(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Merge the chunks of a chat stream as a client does."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"],
                {
                    "content": "",
                    "reasoning": "",
                    "reasoning_content": "",
                    "calls": {},
                    "logprobs": None,
                    "finish": None,
                },
            )
            delta = part["delta"]
            for key in ("content", "reasoning", "reasoning_content"):
                choice[key] += delta.get(key) or ""
            for call in delta.get("tool_calls", []):
                slot = choice["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                slot["id"] += call.get("id", "")
                slot["name"] += call["function"].get("name", "")
                slot["arguments"] += call["function"].get("arguments", "")
            if part["logprobs"] is not None:
                choice["logprobs"] = (choice["logprobs"] or []) + part["logprobs"]["content"]
            choice["finish"] = part["finish_reason"] or choice["finish"]
    return choices


def merge_text(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """Merge the chunks of a completions stream as a client does."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None, "finish": None})
            choice["text"] += part["text"]
            if part["logprobs"] is not None:
                told = choice["logprobs"] or {key: [] for key in part["logprobs"]}
                choice["logprobs"] = {key: told[key] + more for key, more in part["logprobs"].items()}
            choice["finish"] = part["finish_reason"] or choice["finish"]
    return choices


def merge_blocks(stream: list[Any]) -> list[dict[str, Any]]:
    """Merge events as a client does. Asserts their grammar: blocks one after the other, in order, between the
    start and the end of the message, and nothing else."""
    assert stream[0]["type"] == "message_start"
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    made: list[dict[str, Any]] = []
    partial = ""
    is_open = False
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(made)
            made.append(dict(event["content_block"]))
            is_open, partial = True, ""
            continue
        assert is_open
        assert event["index"] == len(made) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            if made[-1]["type"] == "tool_use":
                made[-1]["input"] = _object(partial)
            continue
        delta = event["delta"]
        match delta["type"], made[-1]["type"]:
            case "text_delta", "text":
                made[-1]["text"] += delta["text"]
            case "thinking_delta", "thinking":
                assert not made[-1]["signature"]
                made[-1]["thinking"] += delta["thinking"]
            case "signature_delta", "thinking":
                made[-1]["signature"] = delta["signature"]
            case "input_json_delta", "tool_use":
                partial += delta["partial_json"]
            case pair:
                raise AssertionError(pair)
    assert not is_open
    return made


def _object(text: str) -> Any:
    """Arguments that were cut off are none."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def merge_items(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge deltas as a client does, and assert that the finished items say the same."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[int, str] = {}
    open_index: int | None = None
    for event in found:
        kind, index = event["type"], event.get("output_index", -1)
        if kind == "response.output_item.added":
            assert open_index is None
            assert index == len(items)
            open_index = index
            items[index] = event["item"]
            texts[index] = ""
        elif kind.endswith(".delta"):
            assert index == open_index
            assert event["item_id"] == items[index]["id"]
            texts[index] += event["delta"]
        elif kind == "response.output_item.done":
            assert index == open_index
            assert event["item"]["id"] == items[index]["id"]
            items[index], open_index = event["item"], None
        elif kind.endswith(".done") and "part" not in event:
            whole = {event.get(key) for key in ("text", "arguments", "input")} - {None}
            assert whole == {texts[index]}
    assert open_index is None
    return list(items.values())
