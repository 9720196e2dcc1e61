"""A worker of the version before, without a model: its hand-over to another gateway, as of `e954cef`."""

import argparse
import json
import os
import sys
from typing import Any

import zmq

from tests.support import before as wire


class Worker:
    """Introduces itself to each gateway that welcomes it, and leaves when it is shut down."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        context = zmq.Context()
        self.down: Any = context.socket(zmq.DEALER)
        self.down.setsockopt(zmq.ROUTING_ID, f"{spec['name']}#{spec['epoch']}".encode())
        self.down.connect(spec["down"])
        self.down.send(b"")
        self.up: Any = context.socket(zmq.PUSH)
        self.up.connect(spec["up"])

    def run(self) -> None:
        name, epoch = self.spec["name"], self.spec["epoch"]
        while True:
            match wire.decode(self.down.recv()):
                case [wire.WELCOME, *_]:
                    self.send(wire.HELLO, name, epoch, os.getpid(), wire.PROTOCOL, 0, "0.1.0", "", "ready")
                case [wire.SHUTDOWN, _]:
                    self.send(wire.GOODBYE, epoch, "asked", None)
                    return
                case _:
                    pass

    def send(self, tag: int, *fields: Any) -> None:
        self.up.send(wire.encode(tag, *fields))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--spec", required=True)
    Worker(json.loads(parser.parse_args().spec)).run()
    sys.exit(0)
