"""The daemon that lives as long as a verb: what ends it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

# A verb whose daemon is a process that only sleeps.
VERB = """
import signal, subprocess, sys, time
from gateway.ctl import chat_verbs as module
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup
popen = subprocess.Popen
def start(command, **options):
    process = popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)
    print(process.pid, flush=True)
    return process
module.subprocess.Popen = start
module.offline.daemon = lambda: None
module._wait_until_ready = lambda process, said: None
with module.running_daemon(lambda line: print("ready", flush=True)):
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_the_verb_ends_its_daemon(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", VERB], stdout=subprocess.PIPE, text=True) as verb:
        assert verb.stdout is not None
        daemon = int(verb.stdout.readline())
        assert verb.stdout.readline() == "ready\n"
        verb.send_signal(number)
        status = verb.wait()
    try:
        assert status == 128 + number
        with pytest.raises(ProcessLookupError):
            os.kill(daemon, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(daemon, signal.SIGKILL)
