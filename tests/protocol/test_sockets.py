"""The sockets: their addresses, their options, and who may speak."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import sockets
from protocol.codec import MAX_FRAME_BYTES
from tests.support.scale import patient
from tests.support.wire import TIMEOUT_MS, Wire


@pytest.fixture
def wire(run_dir: Path) -> Iterator[Wire]:
    with Wire(run_dir) as made:
        yield made


def test_addresses_are_below_the_run_directory(tmp_path: Path) -> None:
    assert sockets.addresses(tmp_path) == (f"ipc://{tmp_path}/d.sock", f"ipc://{tmp_path}/u.sock")


@pytest.mark.parametrize("start", ["a", "é"])
def test_the_longest_path_that_is_accepted_can_be_bound_and_one_byte_more_is_refused(run_dir: Path, start: str) -> None:
    room = sockets.IPC_PATH_MAX - len(os.fsencode(run_dir / start / "d.sock"))
    longest = run_dir / (start + "a" * room)
    longest.mkdir()
    with Wire(longest) as wire:
        wire.router()
        assert (longest / "d.sock").is_socket()
    with pytest.raises(sockets.PathTooLong, match="MLXD_HOME"):
        sockets.addresses(run_dir / (start + "a" * (room + 1)))


def test_every_socket_has_the_limits_of_the_protocol(wire: Wire) -> None:
    made = [
        wire.router(),
        wire.pull(),
        wire.dealer(b"qwen#3"),
        wire.push(),
    ]
    for socket in made:
        assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 0
        assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES
    lingers = [socket.getsockopt(zmq.LINGER) for socket in made]
    assert lingers == [0, 0, 0, sockets.GOODBYE_LINGER_MS]
    assert made[2].getsockopt(zmq.ROUTING_ID) == b"qwen#3"
    assert made[3].getsockopt(zmq.IMMEDIATE) == 1


def test_an_empty_frame_makes_a_worker_reachable(wire: Wire) -> None:
    router, dealer = wire.router(), wire.dealer(b"qwen#3")
    dealer.send(b"")
    assert router.poll(patient(TIMEOUT_MS))
    assert router.recv_multipart() == [b"qwen#3", b""]
    router.send_multipart([b"qwen#3", b"hello"])
    assert dealer.poll(patient(TIMEOUT_MS))
    assert dealer.recv() == b"hello"


def test_sending_to_a_worker_that_is_not_there_raises(wire: Wire) -> None:
    router = wire.router()
    with pytest.raises(zmq.ZMQError) as caught:
        router.send_multipart([b"nobody#1", b"hello"])
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_a_worker_does_not_queue_for_a_gateway_that_is_not_there(wire: Wire) -> None:
    push = wire.push()
    with pytest.raises(zmq.Again):
        push.send(b"hello", zmq.NOBLOCK)


def test_an_oversized_frame_is_never_delivered(wire: Wire) -> None:
    pull, push = wire.pull(), wire.push()
    push.send(bytes(MAX_FRAME_BYTES + 1))
    # The sender is cut off, connects again, and goes on: the next frame arrives first.
    other = wire.push()
    other.send(b"after")
    assert pull.poll(patient(TIMEOUT_MS))
    assert pull.recv() == b"after"


def test_importing_the_protocol_is_cheap_and_free_of_both_sides() -> None:
    code = "import sys, protocol.spec, protocol.codec, protocol.sockets, protocol.failures; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"gateway", "worker", "mlx", "starlette", "numpy", "transformers", "asyncio"} & set(loaded)
