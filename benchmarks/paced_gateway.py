"""The real gateway with the synthetic worker: `python -m benchmarks.paced_gateway HOME --step-ms 25`."""

import argparse
import sys
from pathlib import Path

import msgspec

from gateway.access.key import has_keys
from gateway.config.load import load_config
from gateway.main import serve
from protocol.spec import WorkerSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("--step-ms", required=True)
    args = parser.parse_args()

    def command(spec: WorkerSpec) -> list[str]:
        own = [spec.name, "--spec", msgspec.json.encode(spec).decode(), "--step-ms", args.step_ms]
        return [sys.executable, "-P", "-m", "benchmarks.paced", *own]

    sys.exit(serve(lambda: load_config(args.home, has_keys=has_keys), command=command))


if __name__ == "__main__":
    main()
