"""mlxd with workers that say what they are told: `python -m tests.browser.talkative_daemon [worker options]`."""

import sys

import msgspec

from gateway.access.key_file import has_keys
from gateway.config.load import load_config
from gateway.config.settings import default_home
from gateway.main import serve
from protocol.spec import WorkerSpec
from tests.support.pool import SCRIPTED

TALKATIVE = SCRIPTED.with_name("talkative.py")


def command(spec: WorkerSpec) -> list[str]:
    given = msgspec.json.encode(spec).decode()
    return [sys.executable, str(TALKATIVE), spec.name, "--spec", given, *sys.argv[1:]]


if __name__ == "__main__":
    sys.exit(serve(lambda: load_config(default_home(), has_keys=has_keys), command=command))
