import io
import json
import os

import pytest

from gateway.telemetry.logs import LogSinks
from gateway.workers.supervisor.child import Output
from gateway.workers.supervisor.exits_and_restarts import crash_report
from tests.gateway.harness import until


async def lines_of(level: str, data: bytes, count: int) -> list[tuple[str, str]]:
    """Log lines of a worker's output at this level."""
    stream = io.StringIO()
    with LogSinks(level, json=True, stream=stream):
        read_end, write_end = os.pipe()
        output = Output(read_end, "m#1")
        os.write(write_end, data)
        os.close(write_end)
        await until(lambda: len(output.lines) == count)
        output.close()
    return [(line["level"], line["message"]) for line in map(json.loads, stream.getvalue().splitlines())]


@pytest.mark.anyio
async def test_a_workers_line_has_the_level_that_the_worker_gave_it() -> None:
    data = b"INFO loaded\nERROR broke\nprinted by a library\n"

    assert await lines_of("info", data, 3) == [
        ("info", "m#1: loaded"),
        ("error", "m#1: broke"),
        ("info", "m#1: printed by a library"),
    ]


@pytest.mark.anyio
async def test_what_the_worker_chose_to_say_is_not_chosen_again_by_our_own_level() -> None:
    data = b"DEBUG detail\nprinted by a library\n"

    assert await lines_of("warning", data, 2) == [("debug", "m#1: detail")]


def test_on_a_mac_the_log_says_where_the_report_of_a_crash_is() -> None:
    for status in (-6, -11):
        assert "/Library/Logs/DiagnosticReports" in crash_report(status, "darwin")
        assert crash_report(status, "linux") == ""
    # SIGKILL, a status of ours, and one that nobody knows.
    assert [crash_report(status, "darwin") for status in (-9, 70, None)] == ["", "", ""]
