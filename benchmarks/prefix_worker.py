"""One worker's engine without daemon or sockets, for `prefix`: orders as JSON lines on stdin, answers on stdout."""

import sys
import threading
import time
from queue import SimpleQueue

import msgspec

from protocol.messages import Delta, Finish, Generate, Rejected, Sampling, Shutdown, Step, TextPrompt, Up, WorkerSpec


class Order(msgspec.Struct, frozen=True):
    """Prompts to answer all at once. `forget`: first let go of the prefix cache in memory; what is on disk stays."""

    prompts: list[str]
    max_tokens: int
    forget: bool = False


class Answer(msgspec.Struct, frozen=True):
    """Of one prompt. `ttft_s` counts from when the first of the order was sent."""

    ttft_s: float
    text: str
    cached: int


class Collected:
    """What the engine has said, by request."""

    def __init__(self) -> None:
        self._deltas: SimpleQueue[tuple[float, Delta]] = SimpleQueue()

    def send(self, message: Up) -> None:
        """Called by the engine thread."""
        if isinstance(message, Step):
            now = time.perf_counter()
            for delta in message.deltas:
                self._deltas.put((now, delta))
        elif isinstance(message, Rejected):
            self._deltas.put((0.0, Delta(message.rid, finish=Finish.ERROR)))

    def answers(self, rids: range, sent: float) -> list[Answer]:
        """Wait for all of them."""
        first: dict[int, float] = {}
        texts: dict[int, list[str]] = {rid: [] for rid in rids}
        cached: dict[int, int] = {}
        while len(cached) < len(rids):
            now, delta = self._deltas.get()
            if delta.text:
                first.setdefault(delta.rid, now)
                texts[delta.rid].append(delta.text)
            if delta.finish is not None:
                cached[delta.rid] = delta.usage.cached if delta.usage else 0
        return [Answer(first.get(rid, sent) - sent, "".join(texts[rid]), cached[rid]) for rid in rids]


def main() -> None:
    from worker.engine import Command, Engine
    from worker.gauges import Gauges
    from worker.intake import Intake
    from worker.loader import load

    model, disk = sys.argv[1:]
    spec = WorkerSpec("bench", model, 1, "", "", cache_bytes=4 << 30, disk_cache_dir=disk, disk_cache_bytes=16 << 30)
    inbox: SimpleQueue[Command] = SimpleQueue()
    collected = Collected()
    loaded = load(spec, lambda *_: None)
    intake = Intake(loaded)
    engine = Engine(loaded, spec, inbox, collected.send, Gauges(), intake.writer)
    engine.warm_up(list(range(10, 30)))

    def carry_out(order: Order, rids: range) -> list[Answer]:
        if order.forget:
            while engine.cache.disk is not None and engine.cache.disk.queued_bytes:
                time.sleep(0.01)
            engine.cache.clear()  # the engine is idle
        sent = time.perf_counter()
        for rid, prompt in zip(rids, order.prompts, strict=True):
            request = Generate(rid, TextPrompt(prompt), Sampling(temperature=0.0), max_tokens=order.max_tokens)
            inbox.put(intake.row(request, time.monotonic()))
        return collected.answers(rids, sent)

    def read_orders() -> None:
        print("ready", flush=True)
        next_rid = 1
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Order)
            rids = range(next_rid, next_rid + len(order.prompts))
            print(msgspec.json.encode(carry_out(order, rids)).decode(), flush=True)
            next_rid = rids.stop
        inbox.put(Shutdown())

    # As in a worker, everything MLX is on the main thread.
    thread = threading.Thread(target=read_orders)
    thread.start()
    engine.run()
    thread.join()


if __name__ == "__main__":
    main()
