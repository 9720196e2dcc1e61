"""Runs parsers over recorded outputs, in any pieces."""

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol import codec
from protocol.from_worker import Delta, DeltaKind, Step
from tests.support.scale import scaled
from worker.output.parsers.events import Event
from worker.output.parsers.parser import make_parser
from worker.output.parsers.reader import NO_CONTROLS, Controls

CASES = Path(__file__).parent / "cases"
TOOL = (DeltaKind.TOOL_BEGIN, DeltaKind.TOOL_END)


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    id: str = ""


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A raw output and what it means. `arguments` is the exact text that is emitted."""

    why: str
    family: str
    raw: str
    content: str
    reasoning: str
    calls: list[Call]
    tools: list[dict[str, Any]] = []
    start_in_reasoning: bool | None = None
    malformed: int = 0
    is_cut: bool = False


def load_cases() -> list[Case]:
    decoder = msgspec.json.Decoder(Case)
    return [decoder.decode(line) for path in sorted(CASES.glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def replay(
    case: Case, cuts: Iterable[int] = (), controls: Controls = NO_CONTROLS, written: Iterable[int] = ()
) -> tuple[list[Event], int]:
    """The events of the case's output in pieces, neighbours merged, and how many calls were malformed.

    It is split at `cuts`, and control tokens begin where `written` says.
    """
    ids = (f"id{n}" for n in itertools.count())
    parser = make_parser(
        case.family,
        tools=case.tools,
        start_in_reasoning=case.start_in_reasoning,
        controls=controls,
        new_id=lambda: next(ids),
    )
    for at in written:
        parser.note_control(at)
    ends = [*cuts, len(case.raw)]
    events: list[Event] = []
    for begin, end in itertools.pairwise([0, *ends]):
        events += parser.feed(case.raw[begin:end])
    events += parser.finish(case.is_cut)
    assert parser.finish() == []
    codec.encode(Step(1, 1, [Delta(1, event.kind, event.text, tool=event.tool) for event in events]))
    assert parser.saw_tool_call == any(event.kind is DeltaKind.TOOL_BEGIN for event in events)
    assert parser.is_broken or all(is_json(call.arguments) for call in calls_of(events))
    assert not parser.is_broken or parser.malformed
    return list(merged(events)), parser.malformed


def merged(events: Iterable[Event]) -> Iterator[Event]:
    for (kind, tool), group in itertools.groupby(events, lambda event: (event.kind, event.tool)):
        yield Event(kind, "".join(event.text for event in group), tool)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def text_of(events: list[Event], kind: DeltaKind) -> str:
    return "".join(event.text for event in events if event.kind is kind)


def calls_of(events: list[Event]) -> list[Call]:
    calls: dict[int, Call] = {}
    for event in events:
        if event.tool is None:
            continue
        index = event.tool.index
        if event.kind is DeltaKind.TOOL_BEGIN:
            calls[index] = Call(event.tool.name, "", event.tool.call_id)
        else:
            call = calls[index]
            assert call.id == event.tool.call_id
            calls[index] = Call(call.name, call.arguments + event.text, call.id)
    return list(calls.values())


def check_shape(events: list[Event], malformed: int) -> None:
    """Assert the invariants of any output."""
    open_index = None
    for event in events:
        if event.kind is DeltaKind.TOOL_BEGIN:
            assert open_index is None
            assert event.tool is not None
            assert event.tool.name
            open_index = event.tool.index
        elif event.kind in (DeltaKind.TOOL_ARGS, DeltaKind.TOOL_END):
            assert event.tool is not None
            assert event.tool.index == open_index
            open_index = None if event.kind is DeltaKind.TOOL_END else open_index
        else:
            assert open_index is None
            assert event.text
    assert open_index is None
    assert len({call.id for call in calls_of(events)}) == len(calls_of(events))
    whole = [call.arguments for call in calls_of(events) if is_json(call.arguments)]
    assert all(isinstance(json.loads(arguments), dict) for arguments in whole)
    assert len(calls_of(events)) - len(whole) <= malformed


def some_cuts(text: str) -> Sequence[int]:
    """Places to cut an output in two: every one in a full run, else at most 24."""
    places = range(1, len(text))
    return sorted(random.Random(text).sample(places, min(len(places), scaled(len(places), 24))))


def random_cuts(text: str, rng: random.Random) -> list[int]:
    return sorted(rng.sample(range(len(text)), min(len(text), rng.randint(1, 12))))
