"""A batch of a daemon that is killed amid it: the next daemon ends it, with each request once."""

import json
import time
from collections import Counter
from typing import Any

from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patient

DEADLINE_S = 60
CHAT = "/v1/chat/completions"
COUNT = 12
SHORT = 4


def asking(at: int) -> dict[str, Any]:
    return {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20 + at if at < SHORT else 300}


def batch_when(daemon: DaemonProcess, name: str, completed: int) -> dict[str, Any]:
    """The batch, once so many of its requests are completed."""
    end = time.monotonic() + patient(DEADLINE_S)
    while (batch := daemon.client.get(f"/v1/batches/{name}").json())["request_counts"]["completed"] < completed:
        assert time.monotonic() < end, batch
        time.sleep(0.01)
    return batch


def ended(daemon: DaemonProcess, name: str) -> dict[str, Any]:
    end = time.monotonic() + patient(DEADLINE_S)
    while (batch := daemon.client.get(f"/v1/batches/{name}").json())["status"] != "completed":
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def test_a_batch_of_a_killed_daemon_ends_with_each_request_once() -> None:
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": CHAT, "body": asking(at)} for at in range(COUNT)]
    content = "\n".join(map(json.dumps, lines))
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "--step-ms=5") as first:
            file = first.client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"}).json()
            body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h", "metadata": {"k": "v"}}
            name = first.client.post("/v1/batches", json=body).json()["id"]
            # The others take seconds.
            amid = batch_when(first, name, 1)
            written = (home / "state" / "batches" / f"{name}.out").read_text().splitlines()
            first.kill()
        assert amid["request_counts"]["completed"] < COUNT, "it had ended before"
        with DaemonProcess(home, "--step-ms=5") as second:
            batch = ended(second, name)
            text = second.client.get(f"/v1/files/{batch['output_file_id']}/content").text
            alone = [second.client.post(CHAT, json=asking(at)).json() for at in range(SHORT + 1)]

    results = [json.loads(each) for each in text.splitlines()]
    assert Counter(each["custom_id"] for each in results) == Counter(f"r{at}" for at in range(COUNT))
    assert set(written) <= set(text.splitlines()), "what was done is not done again"
    bodies = {each["custom_id"]: each["response"]["body"] for each in results}
    for at in range(COUNT):
        expected = alone[min(at, SHORT)]
        assert bodies[f"r{at}"]["choices"] == expected["choices"]
        assert bodies[f"r{at}"]["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    assert (batch["metadata"], batch["error_file_id"]) == ({"k": "v"}, None)
    assert batch["request_counts"] == {"total": COUNT, "completed": COUNT, "failed": 0}
