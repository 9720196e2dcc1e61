"""Messages that cannot be sent as they are: an error of one request, and never silence."""

import pytest

from protocol import codec
from protocol.failures import Code, Failure
from protocol.from_worker import Delta, DeltaKind, Finish, Rejected, Step, Tokenized, ToolCallDelta, Up
from protocol.stats import Stats
from protocol.to_worker import Abort
from worker.engine.gauges import Gauges
from worker.link import MessageEncoder

LIMIT = 4096
HALF = "\ud800"
STATS = Stats(*range(1, 9))


class Sender:
    """A sender that keeps the decoded messages."""

    def __init__(self) -> None:
        self.gauges = Gauges()
        self.aborts: list[Abort] = []
        self._frames = MessageEncoder(self.gauges, self.aborts.append, LIMIT)

    def send(self, message: Up) -> list[Up]:
        frames = list(self._frames.encode(message))
        assert all(len(frame) <= LIMIT for frame in frames)
        return [codec.decode_up(frame) for frame in frames]


@pytest.fixture
def sender() -> Sender:
    return Sender()


def test_a_message_that_fits_is_sent_as_it_is(sender: Sender) -> None:
    step = Step(1, 2, [Delta(3, text="né 🙂")], STATS)
    assert sender.send(step) == [step]
    assert sender.gauges.repaired_messages == 0


@pytest.mark.parametrize(
    ("message", "sent"),
    [
        (
            Rejected(1, Failure(Code.INVALID_REQUEST, f"né /{HALF}/type", HALF, HALF)),
            Rejected(1, Failure(Code.INVALID_REQUEST, "né /?/type", "?", "?")),
        ),
        (
            Step(
                1,
                2,
                [Delta(3, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, f"id{HALF}", f"f{HALF}")), Delta(4, text="né")],
                STATS,
            ),
            Step(
                1, 2, [Delta(3, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "id?", "f?")), Delta(4, text="né")], STATS
            ),
        ),
        (Tokenized(1, 2, (3, 4), HALF), Tokenized(1, 2, (3, 4), "?")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_half_a_surrogate_becomes_a_question_mark_and_all_else_stays(sender: Sender, message: Up, sent: Up) -> None:
    assert sender.send(message) == [sent]
    assert sender.gauges.repaired_messages == 1


def test_an_answer_that_is_too_large_is_a_refusal(sender: Sender) -> None:
    (rejected,) = sender.send(Tokenized(7, 1, text="x" * LIMIT))
    assert isinstance(rejected, Rejected)
    assert (rejected.rid, rejected.failure.code) == (7, Code.INVALID_REQUEST)
    assert sender.gauges.repaired_messages == 1


def test_a_refusal_that_is_too_large_is_a_shorter_one(sender: Sender) -> None:
    (rejected,) = sender.send(Rejected(7, Failure(Code.INTERNAL, "x" * LIMIT)))
    assert isinstance(rejected, Rejected)
    assert rejected.rid == 7


def test_a_step_that_is_too_large_is_split_in_order(sender: Sender) -> None:
    deltas = [Delta(rid, text="x" * 1000) for rid in range(10)]
    steps = sender.send(Step(1, 2, deltas, STATS))
    assert len(steps) > 1
    assert [delta for step in steps if isinstance(step, Step) for delta in step.deltas] == deltas
    assert [step.stats for step in steps if isinstance(step, Step) and step.stats] == [STATS]
    assert sender.aborts == []


def test_output_that_is_too_large_ends_its_sequence_alone_and_once(sender: Sender) -> None:
    (first, second) = sender.send(Step(1, 2, [Delta(1, text="x" * LIMIT), Delta(2, text="a")]))
    assert isinstance(first, Step)
    assert isinstance(second, Step)
    (ended,) = first.deltas
    assert (ended.rid, ended.finish, ended.text) == (1, Finish.ERROR, "")
    assert ended.failure is not None
    assert second.deltas == [Delta(2, text="a")]
    assert sender.aborts == [Abort((1,), "too large")]

    # What the engine still says of it, up to its own end, is not sent.
    assert sender.send(Step(1, 3, [Delta(1, text="b"), Delta(2, text="b")])) == [Step(1, 3, [Delta(2, text="b")])]
    assert sender.send(Step(1, 4, [Delta(1, finish=Finish.ABORT)])) == [Step(1, 4, [])]
    again = Step(1, 5, [Delta(1, text="c")])
    assert sender.send(again) == [again]
