"""A process of tests ends cleanly after a thread that has computed with MLX."""

import subprocess
import sys

from tests.support.scale import patient

# The thread's compiled functions take a while to be destroyed, in which the process reaches its end.
PROGRAM = """
import sys, threading
import mlx.core as mx
from tests.support.threads import join

functions = [mx.compile(lambda x, number=number: x + number) for number in range(2000)]

def compute():
    for function in functions:
        mx.eval(function(mx.array(1.0)))

thread = threading.Thread(target=compute, daemon=True)
thread.start()
thread.join() if "plain" in sys.argv else join(thread)
"""


def test_a_process_ends_cleanly_after_a_thread_with_compiled_functions() -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
