"""A worker of the version before, without a model: it says and understands what `e954cef` did, and dies of what is new.

Token i of a sequence is the id i and the text "ti ".
"""

import argparse
import json
import os
import sys
from typing import Any

import zmq

from tests.support import before as wire


class Worker:
    """Waits for a gateway that welcomes it, and serves it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        context = zmq.Context()
        self.down: Any = context.socket(zmq.DEALER)
        self.down.setsockopt(zmq.ROUTING_ID, f"{spec['name']}#{spec['epoch']}".encode())
        self.down.connect(spec["down"])
        self.down.send(b"")
        self.up: Any = context.socket(zmq.PUSH)
        self.up.connect(spec["up"])
        self.seq = 0

    def run(self) -> None:
        while True:
            match wire.decode(self.down.recv()):
                case [wire.WELCOME, *_]:
                    self.say(wire.HELLO, self.spec["name"], self.spec["epoch"], os.getpid(), 1, 0, "0.1.0", "", "ready")
                    self.say(wire.READY, self.spec["epoch"], "demo", 1 << 20, 16, 4096, 0, 0.1, "qwen3", True)
                case [wire.PING, seq, t_ns]:
                    self.say(wire.PONG, seq, t_ns, wire.STATS)
                case [wire.GENERATE, rid, [wire.TEXT_PROMPT, _, *_], _, max_tokens, *_]:
                    self.generate(rid, max_tokens)
                case [wire.DETOKENIZE, rid, ids]:
                    self.say(wire.TOKENIZED, rid, len(ids), [], "".join(f"t{i} " for i in ids))
                case [wire.DRAIN, _]:
                    self.say(wire.DRAINED, self.spec["epoch"], 0)
                case [wire.SHUTDOWN, _]:
                    self.say(wire.GOODBYE, self.spec["epoch"], "asked", None)
                    return
                case _:
                    pass

    def generate(self, rid: int, tokens: int) -> None:
        self.say(wire.ACCEPTED, rid, 3)
        for i in range(tokens):
            usage = [3, 0, tokens, 0, 0.0, 0.0, 0.0] if i == tokens - 1 else None
            finish = wire.LENGTH if usage else None
            self.seq += 1
            delta = [rid, 0, f"t{i} ", [i], None, None, finish, usage, None, ""]
            self.say(wire.STEP, self.spec["epoch"], self.seq, [delta], wire.STATS)

    def say(self, tag: int, *fields: Any) -> None:
        self.up.send(wire.encode(tag, *fields))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--spec", required=True)
    Worker(json.loads(parser.parse_args().spec)).run()
    sys.exit(0)
