"""Messages of a group survive their frames; what is no message is malformed."""

import pytest

from protocol import group as g
from protocol.codec import MalformedFrame
from protocol.failures import Code, Failure
from protocol.from_worker import Goodbye, RankInfo
from protocol.to_worker import SetMemory, Shutdown

INSERT = g.InsertRow(
    1 << 62, [1, 2], [3], 9, 1, True, (7,), [1], "salt", 0, [g.RowQuestion([4, 5], [[6], [7, 8]])], [128]
)
OPS: list[g.Op] = [
    g.BeginGroup("together", 1 << 40, True),
    INSERT,
    g.RemoveRow(1 << 62),
    g.ResizeCache(1 << 40, 1, 2, 3),
    g.ClearCache(),
    g.StoreEnded(),
    SetMemory(1 << 40, 0.5, 0.25),
    Shutdown(),
]


def test_each_operation_of_a_plan_survives_its_frame() -> None:
    plan = g.TickPlan(7, 0xFFFFFFFF, OPS, 512, False)
    assert g.decode_down(g.encode(plan)) == plan


def test_what_followers_say_survives_its_frame() -> None:
    join = g.JoinGroup(
        3,
        RankInfo(1, "far", "né", 42, "gpu"),
        g.Versions("0.1.0", "0.32.4", "0.32.2"),
        "form",
        ("1.2.3.4:5",),
    )
    said: list[g.Up] = [
        join,
        g.RankLoaded(2, True),
        g.PlanDone(7, 8, 9, 10),
        g.RankMemory(2, ((3, 4),), 5, 6, 7, 8, 9),
    ]
    assert [g.decode_up(g.encode(message)) for message in said] == said
    watched: list[g.Watch] = [
        g.RankHeartbeat(3, 2),
        Goodbye(3, "the rank ends", Failure(Code.INCOMPATIBLE, "versions")),
    ]
    assert [g.decode_watch(g.encode(message)) for message in watched] == watched


def test_a_plan_of_a_plain_step_is_a_few_bytes() -> None:
    assert len(g.encode(g.TickPlan(1 << 20, 1 << 31, [], 512))) <= 20


@pytest.mark.parametrize("frame", [b"", b"\xff", b"\x91\x7f", g.encode(g.StartLoading("ring", "tensor"))])
def test_a_frame_of_another_kind_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        g.decode_up(frame)
