"""mlxd with scripted workers: `python -m tests.browser.scripted_daemon talkative|seeing [worker options]`."""

import sys

import msgspec

from gateway.access.key import has_keys
from gateway.config.load import load_config
from gateway.main import serve
from gateway.state_dir import default_home
from protocol.spec import WorkerSpec
from tests.support.scripted_worker import SCRIPTED


def command(spec: WorkerSpec) -> list[str]:
    worker = SCRIPTED.with_name(f"{sys.argv[1]}.py")
    given = msgspec.json.encode(spec).decode()
    return [sys.executable, str(worker), spec.name, "--spec", given, *sys.argv[2:]]


if __name__ == "__main__":
    sys.exit(serve(lambda: load_config(default_home(), has_keys=has_keys), command=command))
