"""Next turns: a chat that has just been answered, rendered as the beginning of the prompt that its client sends next.

Templates render the last answer in a history unlike its tokens: without its reasoning, say, or with other spaces. Its
KV is then of no use to the next turn. While the model is idle, the gateway has that beginning prefilled.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from msgspec import structs

from protocol.failures import Code
from protocol.from_worker import DeltaKind
from protocol.to_worker import ChatPrompt, NextTurnPrompt, Sampling
from worker.engine.output import OutputWriter
from worker.engine.row import Row, RowStats, RowText
from worker.errors import RequestInvalid
from worker.output.parsers.events import Event
from worker.output.parsers.families import FAMILIES
from worker.output.parsers.parser import Parser
from worker.output.parsers.think_and_calls import MarkupGrammar
from worker.output.stops import StopScanner
from worker.prefix_cache.radix_tree import common_prefix
from worker.prompt.family import ModelFamily
from worker.prompt.miss_explainer import RecentPrompt, RecentPrompts

# Messages of the next turn are unknown. What is rendered alike with either of these texts comes before them.
_UNKNOWN_TEXTS: Final = ("0", "Is it")

# Stands for the token that ended an answer, which has no text.
_END: Final = 0


class NextTurnPrompts:
    """Encoder of the prompts of next turns, for one loaded model."""

    def __init__(self, recent: RecentPrompts, writer: OutputWriter, family: ModelFamily) -> None:
        self._recent = recent
        self._writer = writer
        self._family = family

    def encode(
        self,
        prompt: NextTurnPrompt,
        render: Callable[[ChatPrompt], str],
        encode: Callable[[ChatPrompt], Sequence[int]],
    ) -> list[int]:
        """Return the token ids of the conversation, up to the unknown text of its next message. `render` returns the
        text of a chat, and `encode` its token ids. Raises `RequestInvalid`."""
        known = self._recent.until(prompt.rid)
        if not known or not _is_usable(known[-1]):
            raise RequestInvalid(Code.INVALID_REQUEST, f"the conversation of request {prompt.rid} is not known")
        answered = known[-1]
        chat = answered.prompt
        assert isinstance(chat, ChatPrompt)
        parser, _ = self._family.parser(chat, render(chat), id_seed=f"{prompt.rid}:{prompt.seed}")
        turn = _with_start(assistant_turn(self._events(answered, parser)), self._family.family)
        first, second = (np.array(encode(_continued(chat, turn, text)), dtype=np.int32) for text in _UNKNOWN_TEXTS)
        return first[: common_prefix(first, second)].tolist()

    def _events(self, answered: RecentPrompt, parser: Parser) -> list[Event]:
        """Return the events of an answer that ended by itself."""
        ids = answered.keys.tolist()
        text = RowText(self._family.chat_vocabulary.detokenizer(ids), StopScanner(()), parser=parser)
        row = Row(answered.rid, ids, Sampling(), len(answered.output) + 1, text, RowStats(0.0))
        events: list[Event] = []
        for token in answered.output:
            events += self._writer.advance(row, token, None, None).events
        return events + self._writer.advance(row, _END, "stop", None).events


def assistant_turn(events: Sequence[Event]) -> dict[str, Any]:
    """Return an answer as a message for the chat template."""
    content, reasoning = _text(events, DeltaKind.TEXT), _text(events, DeltaKind.REASONING)
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if calls := [event for event in events if event.kind is DeltaKind.TOOL_BEGIN]:
        turn["tool_calls"] = [_call(event, events) for event in calls]
    if reasoning:
        turn["reasoning_content"] = reasoning
    return turn


def _with_start(turn: dict[str, Any], family: str) -> dict[str, Any]:
    """Write the start of the reasoning into an answer that has only the end, on a line of its own. Clients leave such
    reasoning out, and so does the template."""
    grammar = FAMILIES[family].grammar
    think = grammar.think if isinstance(grammar, MarkupGrammar) else None
    content = turn["content"]
    if think is None or any(start in content for start in think.starts):
        return turn
    is_ended = any(f"\n{end}\n" in f"{content}\n" for end in think.ends)
    return {**turn, "content": f"{think.starts[0]}\n{content}"} if is_ended else turn


def _text(events: Sequence[Event], kind: DeltaKind, index: int | None = None) -> str:
    return "".join(
        event.text
        for event in events
        if event.kind is kind and (index is None or (event.tool is not None and event.tool.index == index))
    )


def _call(begin: Event, events: Sequence[Event]) -> dict[str, Any]:
    """Return a tool call, with its arguments as an object, which templates need."""
    tool = begin.tool
    assert tool is not None
    written = _text(events, DeltaKind.TOOL_ARGS, tool.index)
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = {"arguments": written}
    return {"id": tool.call_id, "type": "function", "function": {"name": tool.name, "arguments": arguments}}


def _is_usable(answered: RecentPrompt) -> bool:
    """Whether a sequence is a whole chat of text, whose KV is in the prefix cache."""
    prompt = answered.prompt
    is_whole_chat = isinstance(prompt, ChatPrompt) and not prompt.media and not prompt.continue_final
    return is_whole_chat and answered.truncated == (0, 0) and not answered.is_sparse


def _continued(chat: ChatPrompt, turn: dict[str, Any], text: str) -> ChatPrompt:
    """Return the chat with its answer, and with a message that has this text: the result of each call, or a user's."""
    calls = turn.get("tool_calls", ())
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text, "name": call["function"]["name"]}
        for call in calls
    ]
    following = results[:1] if results else [{"role": "user", "content": text}]
    return structs.replace(chat, messages=[*chat.messages, turn, *following])
