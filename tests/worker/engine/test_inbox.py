import threading
import time

from protocol.to_worker import Abort, Shutdown
from tests.support.rows import row
from tests.support.scale import patient
from worker.engine.inbox import EngineInbox, WakeUp


def test_everything_that_is_there_is_taken_without_waiting() -> None:
    inbox = EngineInbox()
    commands = [WakeUp.UP, Abort((1,), ""), Shutdown()]
    for command in commands:
        inbox.put(command)
    assert inbox.receive(is_idle=False, is_waiting=False) == commands
    assert inbox.receive(is_idle=False, is_waiting=False) == []


def test_a_lone_client_that_comes_back_is_not_kept_waiting() -> None:
    inbox = EngineInbox(gather_s=3600.0, quiet_s=3600.0)
    inbox.note_answer(time.monotonic())
    only = row(1)
    inbox.put(only)
    assert inbox.receive(is_idle=True, is_waiting=False) == [only]


def test_clients_that_were_answered_together_are_waited_for() -> None:
    inbox = EngineInbox(gather_s=30.0, quiet_s=30.0)
    for _ in range(3):
        inbox.note_answer(time.monotonic())
    rows = [row(rid) for rid in range(3)]
    inbox.put(rows[0])
    thread = threading.Thread(target=lambda: [inbox.put(late) for late in rows[1:]])
    thread.start()
    assert inbox.receive(is_idle=True, is_waiting=False) == rows
    thread.join()


def test_those_who_do_not_come_back_are_not_waited_for_long() -> None:
    inbox = EngineInbox()
    for _ in range(3):
        inbox.note_answer(time.monotonic())
    only = row(1)
    inbox.put(only)
    assert inbox.receive(is_idle=True, is_waiting=False) == [only]


def test_a_burst_is_taken_together() -> None:
    # It waits for more until the time of a burst is over.
    inbox = EngineInbox(gather_s=patient(0.3), burst_s=patient(0.3))
    rows = [row(rid) for rid in range(3)]
    inbox.put(rows[0])

    def come_late() -> None:
        time.sleep(0.05)
        for command in (*rows[1:], WakeUp.UP):
            inbox.put(command)

    thread = threading.Thread(target=come_late)
    thread.start()
    assert inbox.receive(is_idle=True, is_waiting=False) == [*rows, WakeUp.UP]
    thread.join()


def test_what_is_no_request_is_never_delayed() -> None:
    inbox = EngineInbox(gather_s=3600.0, burst_s=3600.0)
    command = Shutdown()
    inbox.put(command)
    assert inbox.receive(is_idle=True, is_waiting=False) == [command]


def test_an_answer_long_ago_lets_nobody_wait() -> None:
    inbox = EngineInbox(gather_s=3600.0, quiet_s=3600.0)
    for _ in range(3):
        inbox.note_answer(time.monotonic() - 1.0)
    only = row(1)
    inbox.put(only)
    assert inbox.receive(is_idle=True, is_waiting=False) == [only]
