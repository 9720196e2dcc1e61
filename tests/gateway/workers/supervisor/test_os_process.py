"""Facts about a process by its pid: parsed from samples, and of this Linux for real."""

import os

from gateway.workers.supervisor.child import darwin_start_ticks, linux_start_ticks, start_ticks


def test_a_process_is_known_by_its_start_since_the_boot() -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    assert linux_start_ticks(f"7 (a) b (c) R {fields}") == 22
    assert linux_start_ticks("") == 0
    assert darwin_start_ticks(bytes(80) + (123456789).to_bytes(8, "little") + bytes(8)) == 123456789
    assert darwin_start_ticks(b"") == 0
    assert 0 < start_ticks(1) <= start_ticks(os.getpid()) == start_ticks(os.getpid())
    assert start_ticks(2**30) == 0
