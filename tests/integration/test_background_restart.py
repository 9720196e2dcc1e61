"""Background responses of a daemon that is killed, hands over and is stopped: each is as if nothing had happened."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patience, patient, scaled

ModelFolder = Callable[[str], Path]
DEADLINE_S = 60
# So long that it still runs when a slow machine comes to end its daemon.
TOKENS = round(scaled(300, 150) * min(patience(), 2))
BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.95},
]


@pytest.fixture
def home(model_folder: ModelFolder) -> Iterator[Path]:
    with short_home() as path:
        write_config(path, ("m",))
        config = path / "mlxd.toml"
        # One token a step: drafts would end a stream before its daemon can be.
        model = f'path = "{model_folder("qwen3")}"\nspeculate = "off"'
        config.write_text(config.read_text().replace('path = "demo"', model))
        yield path


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "ka to mi ra", "max_output_tokens": TOKENS, "background": True} | fields


class Reader:
    """A client of one response, which comes back for the events that it has not had."""

    def __init__(self, response_id: str) -> None:
        self.id = response_id
        self.told: list[Any] = []

    def read(self, daemon: DaemonProcess, characters: int) -> None:
        """Until it has so many characters, or the end."""
        place = f"/v1/responses/{self.id}?stream=true"
        after = f"&starting_after={self.told[-1]['sequence_number']}" if self.told else ""
        with daemon.client.stream("GET", place + after, timeout=patient(DEADLINE_S)) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.told.append(json.loads(line[6:]))
                    if len(self.text) >= characters:
                        return

    @property
    def text(self) -> str:
        return "".join(each["delta"] for each in self.told if each["type"] == "response.output_text.delta")

    @property
    def last(self) -> dict[str, Any]:
        return self.told[-1]["response"]


def begun(daemon: DaemonProcess) -> list[Reader]:
    made = [daemon.client.post("/v1/responses", json=asking(**body)) for body in BODIES]
    return [Reader(answer.json()["id"]) for answer in made]


def test_a_response_of_a_killed_daemon_is_the_undisturbed_one(home: Path) -> None:
    with DaemonProcess(home, module="gateway.main") as first:
        expected = begun(first)
        for reader in expected:
            reader.read(first, 1 << 30)
        sizes = [len(reader.text) for reader in expected]
        readers = begun(first)
        for reader, size in zip(readers, sizes, strict=True):
            reader.read(first, size // 5)
        assert all("response" not in reader.told[-1] for reader in readers), "it had ended before"
        workers = first.worker_pids()
        first.kill()
        with DaemonProcess(home, module="gateway.main") as second:
            for reader in readers:
                reader.read(second, 1 << 30)
            # The model stayed loaded.
            assert second.worker_pids() == workers
            until_gone(home)

    for reader, other in zip(readers, expected, strict=True):
        assert [event["sequence_number"] for event in reader.told] == list(range(len(reader.told)))
        assert reader.text == other.text
        assert reader.last["output"][0]["content"] == other.last["output"][0]["content"]
        assert reader.last["status"] == other.last["status"] == "incomplete"
        assert reader.last["usage"]["output_tokens"] == other.last["usage"]["output_tokens"] == TOKENS


@pytest.mark.parametrize("end", [*scaled([signal.SIGUSR2], []), signal.SIGTERM])
def test_readers_of_a_daemon_that_ends_are_cut_off_and_find_the_response_going_on(end: signal.Signals) -> None:
    with short_home() as home:
        write_config(home, ("m",), server="drain = 0")
        with DaemonProcess(home, "--step-ms=4") as first:
            reader = Reader(first.client.post("/v1/responses", json=asking(max_output_tokens=50_000)).json()["id"])
            reader.read(first, 20)
            place = f"/v1/responses/{reader.id}?stream=true"
            with first.client.stream("GET", place, timeout=patient(DEADLINE_S)) as response:
                first.process.send_signal(end)
                # Not an end, which a client could take for that of the response.
                with pytest.raises(httpx2.RemoteProtocolError):
                    list(response.iter_lines())
            assert first.wait() == 0
            assert '"level":"error"' not in (home / "logs" / "mlxd.log").read_text()
            with DaemonProcess(home, "--step-ms=4") as second:
                had = len(reader.told)
                reader.read(second, len(reader.text) + 2000)
                assert second.client.delete(f"/v1/responses/{reader.id}").status_code == 200

    assert [event["sequence_number"] for event in reader.told] == list(range(len(reader.told)))
    assert len(reader.told) > had
    assert "".join(f"t{i} " for i in range(50_000)).startswith(reader.text)


def until_gone(home: Path) -> None:
    end = time.monotonic() + patient(DEADLINE_S)
    while list((home / "state" / "background").iterdir()):
        assert time.monotonic() < end, "the journals are not deleted"
        time.sleep(0.02)
