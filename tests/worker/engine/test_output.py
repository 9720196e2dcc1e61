"""Output of tokens: whatever a model writes, a client can read its calls or is told that they are not whole."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.from_worker import DeltaKind, Finish, TokenLogprob
from protocol.to_worker import ChatPrompt, Generate, Sampling
from tests.support.engine import EngineHarness, spec
from tests.support.models import SPECIALS, build, tiny_tokenizer
from tests.support.rows import row
from tests.support.scale import scaled
from tests.worker.output.parsers.replay import Case, is_json, load_cases
from tests.worker.output.parsers.test_fuzz import mutated
from worker.engine.output import OutputWriter, TokenOutput
from worker.engine.row import Row
from worker.output.detokenize import Vocabulary
from worker.output.parsers.parser import make_parser
from worker.output.parsers.reader import Controls
from worker.output.stops import StopScanner

CASES = load_cases()
TOKENIZER = tiny_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER, frozenset(SPECIALS))
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
TEMPLATE = r"""
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def written(case: Case, text: str, ended: str, stop: tuple[str, ...] = ()) -> list[TokenOutput]:
    """The pieces of an output that ends with an end-of-sequence token, or because it may not be longer."""
    of = row(1, detokenizer=VOCABULARY.detokenizer(), stops=StopScanner(stop))
    of.text.parser = make_parser(case.family, tools=case.tools, start_in_reasoning=case.start_in_reasoning)
    return advanced(OutputWriter(VOCABULARY), of, encoded(text), ended)


def advanced(writer: OutputWriter, of: Row, ids: Sequence[int], ended: str) -> list[TokenOutput]:
    if ended == "stop":
        ids = [*ids, *encoded("<|im_end|>")]
    pieces: list[TokenOutput] = []
    for at, token in enumerate(ids, 1):
        pieces.append(writer.advance(of, token, ended if at == len(ids) else None, None))
        if pieces[-1].finish is not None:
            break
    return pieces


def arguments(pieces: Sequence[TokenOutput]) -> list[str]:
    calls: dict[int, str] = {}
    for event in (event for piece in pieces for event in piece.events if event.tool):
        assert event.tool is not None
        calls[event.tool.index] = calls.get(event.tool.index, "") + event.text
    return list(calls.values())


def text_of(pieces: Sequence[TokenOutput]) -> str:
    return "".join(event.text for piece in pieces for event in piece.events if event.kind is DeltaKind.TEXT)


@settings(deadline=None, max_examples=scaled(400, 160))
@given(
    seed=st.integers(0, 1 << 32),
    case=st.sampled_from(CASES),
    ended=st.sampled_from(["stop", "length"]),
    stop=st.sampled_from([(), ("}",), ('"',), ("</",), ("1",)]),
)
def test_calls_are_json_unless_the_finish_reason_is_length(
    seed: int, case: Case, ended: str, stop: tuple[str, ...]
) -> None:
    text = mutated(case.raw, random.Random(seed)) or "x"
    pieces = written(case, text.encode(errors="replace").decode(), ended, stop)
    finish, found = pieces[-1].finish, arguments(pieces)

    assert finish is Finish.LENGTH or all(map(is_json, found))
    assert (finish is Finish.TOOL_CALLS) <= bool(found)


@pytest.mark.parametrize(
    ("text", "ended", "finish", "found"),
    [
        ('{"zone": "UTC", "list": [1, 2', "stop", Finish.TOOL_CALLS, '{"zone": "UTC", "list": [1, 2]}'),
        ('{"zone": "UTC", "list": [1, 2', "length", Finish.LENGTH, '{"zone": "UTC", "list": [1, 2'),
        ('{"zone": "UT', "stop", Finish.LENGTH, '{"zone": "UT'),
        ('{"zone": ', "stop", Finish.LENGTH, '{"zone": '),
        ('{"zone": "UTC" and so on}}</tool_call>', "stop", Finish.LENGTH, '{"zone": "UTC"'),
        ('{"zone": "UTC"}, "and": so on}</tool_call>', "stop", Finish.LENGTH, '{"zone": "UTC"'),
    ],
)
def test_only_brackets_are_added_and_only_where_the_model_has_ended(
    text: str, ended: str, finish: Finish, found: str
) -> None:
    case = Case("", "hermes", "", "", "", [])
    pieces = written(case, f'<tool_call>{{"name": "now", "arguments": {text}', ended)

    assert (pieces[-1].finish, arguments(pieces)) == (finish, [found])


def test_a_stop_string_that_cuts_a_call_is_no_end_of_it() -> None:
    case = Case("", "hermes", "", "", "", [])
    pieces = written(case, '<tool_call>{"name": "f", "arguments": {"n": 12}}</tool_call>', "stop", ("2",))

    assert (pieces[-1].finish, arguments(pieces)) == (Finish.LENGTH, ['{"n": 1'])


def test_where_a_tokens_text_comes_late_the_text_alone_counts() -> None:
    class Late:
        """A detokenizer that is one token behind."""

        def __init__(self) -> None:
            self._inner, self._last = VOCABULARY.detokenizer(), ""

        def add(self, token: int) -> str:
            last, self._last = self._last, self._inner.add(token)
            return last

        def finish(self) -> str:
            return self._last + self._inner.finish()

    controls = {encoded(marker)[0]: marker for marker in SPECIALS}
    of = row(1, detokenizer=Late())
    of.text.parser = make_parser("hermes", controls=Controls(dict.fromkeys(SPECIALS, True)))
    pieces = advanced(OutputWriter(VOCABULARY, controls), of, encoded(CALL), "stop")

    assert [json.loads(found) for found in arguments(pieces)] == [{"zone": "UTC"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = build("qwen3", tmp_path_factory.mktemp("model"))
    (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
    with EngineHarness(spec(folder, parser="hermes")) as running:
        yield running


def spelled(text: str) -> list[int]:
    """The ids of ordinary tokens: control tokens' characters one by one."""
    return [token for char in text for token in encoded(char)]


def answered(engine: EngineHarness, ids: list[int], **prompt: Any) -> tuple[list[TokenOutput], Row]:
    asked = ChatPrompt([{"role": "user", "content": "kato"}], [NOW], **prompt)
    of = engine.intake.row(Generate(1, asked, Sampling()), 0.0)
    return advanced(engine.intake.writer, of, ids, "stop"), of


def test_the_characters_of_a_control_token_are_text_and_the_token_is_markup(engine: EngineHarness) -> None:
    called, _ = answered(engine, encoded(CALL))
    assert (called[-1].finish, text_of(called)) == (Finish.TOOL_CALLS, "")
    assert [json.loads(found) for found in arguments(called)] == [{"zone": "UTC"}]

    said, _ = answered(engine, spelled(CALL))
    assert (said[-1].finish, text_of(said), arguments(said)) == (Finish.STOP, CALL, [])


def test_reasoning_ends_with_its_token_and_not_with_its_characters(engine: EngineHarness) -> None:
    ids = [*encoded("<think>"), *spelled("the tag </think> ends it"), *encoded("</think>Yes.")]
    pieces, of = answered(engine, ids)

    thought = "".join(event.text for piece in pieces for event in piece.events if event.kind is DeltaKind.REASONING)
    assert (thought, text_of(pieces)) == ("the tag </think> ends it", "Yes.")
    assert of.thinking.tokens == len(ids) - len(encoded("Yes."))


def test_what_a_grammar_makes_is_markup_whatever_tokens_it_takes(engine: EngineHarness) -> None:
    called, _ = answered(engine, spelled(CALL), must_call=True)
    assert [json.loads(found) for found in arguments(called)] == [{"zone": "UTC"}]


def test_a_successor_knows_the_control_tokens_that_were_written_before_it(engine: EngineHarness) -> None:
    ids = [*spelled("<tool_call>"), *encoded(CALL)]
    asked = ChatPrompt([{"role": "user", "content": "kato"}], [NOW])
    for count in range(len(ids)):
        of = engine.intake.row(Generate(1, asked, Sampling(), resume=tuple(ids[:count])), 0.0)
        pieces = advanced(engine.intake.writer, of, ids[count:], "stop")
        assert pieces[-1].finish is Finish.TOOL_CALLS


# What a client has: ids, text by kind of event, log-probabilities; and at the end all ids, and what the usage counts.
Client = tuple[list[int], list[tuple[DeltaKind, str]], list[float]]


def client_of(pieces: Sequence[tuple[list[int], TokenOutput]]) -> Client:
    """`pieces` with the ids that left with each."""
    texts: list[tuple[DeltaKind, str]] = []
    for event in (event for _, piece in pieces for event in piece.events):
        if texts and texts[-1][0] is event.kind and event.kind not in (DeltaKind.TOOL_BEGIN, DeltaKind.TOOL_END):
            texts[-1] = event.kind, texts[-1][1] + event.text
        else:
            texts.append((event.kind, event.text))
    logprobs = [each.logprob for _, piece in pieces for each in piece.logprobs or ()]
    return [token for ids, _ in pieces for token in ids], texts, logprobs


class Sender:
    """A worker's side of one row: `sent` are the pieces that its client got."""

    def __init__(self, stop: tuple[str, ...], family: str, resume: Sequence[int] = ()) -> None:
        self.row = row(1, detokenizer=VOCABULARY.detokenizer(), stops=StopScanner(stop), max_tokens=1 << 20)
        self.row.text.parser = make_parser(family) if family else None
        self.writer = OutputWriter(VOCABULARY)
        self.writer.replay(self.row, resume)
        self.sent: list[tuple[list[int], TokenOutput]] = []
        self.ending: list[int] = []

    def add(self, at: int, token: int, ended: str | None) -> bool:
        """Take a token; whether it was the last."""
        piece = self.writer.advance(self.row, token, ended, TokenLogprob(b"", -float(at)))
        if not piece.is_empty:
            self.sent.append((list(self.row.text.unsent), piece))
            self.row.text.unsent.clear()
        self.ending = [held.id for held in self.row.text.held if not held.is_sent]
        return piece.finish is not None


PARTS = ["e", "r", "a", "aa", "b", "\n", "\n\n", "#", "th", "é", "🙂", "<", "/t", "<think>x", "</think>"]
STOPS = [("er",), ("aab",), ("\n\n###",), ("</t", "ab"), ("a" * 5,), ("<tool_call>a", "\n")]


@settings(deadline=None, max_examples=scaled(300, 120))
@given(
    stop=st.sampled_from(STOPS),
    family=st.sampled_from(["", "hermes"]),
    parts=st.lists(st.sampled_from(PARTS), min_size=2, max_size=24),
    ended=st.sampled_from(["stop", "length"]),
)
def test_a_successor_goes_on_with_the_next_character_wherever_a_stream_was_cut(
    stop: tuple[str, ...], family: str, parts: list[str], ended: str
) -> None:
    ids = [token for part in parts for token in encoded(part)] + (encoded("<|im_end|>") if ended == "stop" else [])
    whole = Sender(stop, family)
    cuts: list[int] = []
    for at, token in enumerate(ids):
        cuts.append(len(whole.sent))
        if whole.add(at, token, ended if at == len(ids) - 1 else None):
            break
    told = client_of(whole.sent)
    assert len(told[0]) + len(whole.ending) == whole.row.stats.completion
    for cut in sorted(set(cuts)):
        had = whole.sent[:cut]
        known = client_of(had)[0]
        successor = Sender(stop, family, known)
        for at in range(len(known), len(ids)):
            if successor.add(at, ids[at], ended if at == len(ids) - 1 else None):
                break
        assert client_of([*had, *successor.sent]) == told
        assert (successor.ending, successor.row.stats.completion) == (whole.ending, whole.row.stats.completion)
        assert successor.row.thinking.tokens == whole.row.thinking.tokens


def test_held_text_leaves_with_the_token_that_is_safe_and_no_later_than_the_next() -> None:
    sender = Sender(("er",), "")
    texts: list[str] = []
    for at, token in enumerate(encoded("e") * 3 + encoded("n")):
        sender.add(at, token, None)
        texts.append("".join(event.text for _, piece in sender.sent for event in piece.events))
    assert texts == ["", "", "e", "eeen"]
