"""Two daemons behind LiteLLM's proxy, configured as docs/fleet.md says: when one is killed, clients see no error."""

import asyncio
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.clients.install import pypi
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
PROXY = "litellm[proxy]==1.106.2"
MASTER_KEY = "sk-master"
REQUESTS = 8


def configuration(*urls: str) -> str:
    """The configuration of the page, with the addresses of these daemons."""
    found = re.search(r"```yaml\n(model_list:.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    text = found[1]
    for number, url in enumerate(urls, 1):
        text = text.replace(f"http://studio{number}.local:8484", url)
    assert "studio1.local" not in text
    return text


@contextmanager
def proxy(folder: Path, *urls: str) -> Iterator[httpx2.AsyncClient]:
    """LiteLLM's proxy before these daemons."""
    command = pypi("litellm-proxy", PROXY) / "litellm"
    (folder / "litellm.yaml").write_text(configuration(*urls))
    log = folder / "litellm.log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = {"STUDIO1_KEY": "x", "STUDIO2_KEY": "x", "LITELLM_MASTER_KEY": MASTER_KEY}
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(folder), "PATH": f"{command.parent}:{os.defpath}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [command, "--config", folder / "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)],
            env=keys | offline,
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + patient(120)
        while not _answers(f"{url}/health/liveliness"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        headers = {"authorization": f"Bearer {MASTER_KEY}"}
        yield httpx2.AsyncClient(base_url=url, headers=headers, timeout=patient(120))
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.TransportError:
        return False


def metric(daemon: DaemonProcess, name: str) -> float:
    text = daemon.client.get("/metrics").text
    return sum(float(value) for value in re.findall(rf"^{name}\S* (\S+)$", text, flags=re.MULTILINE))


async def ask(client: httpx2.AsyncClient) -> httpx2.Response:
    body = {"model": "coder", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
    return await client.post("/v1/chat/completions", json=body)


async def test_requests_that_run_on_a_daemon_that_is_killed_are_answered_by_the_other(tmp_path: Path) -> None:
    with ExitStack() as held:
        daemons: list[DaemonProcess] = []
        for _ in range(2):
            home = held.enter_context(short_home())
            write_config(home, ("coder",))
            daemons.append(held.enter_context(DaemonProcess(home, "--step-ms 50")))
        async with held.enter_context(proxy(tmp_path, *(daemon.url for daemon in daemons))) as client:
            while not all(metric(daemon, "mlxd_request_success_total") for daemon in daemons):
                answer = await ask(client)
                assert answer.status_code == 200, answer.text
            asking = [asyncio.create_task(ask(client)) for _ in range(REQUESTS)]
            while not all(metric(daemon, "mlxd_num_requests_running") for daemon in daemons):
                assert not all(each.done() for each in asking), "no request ran on one of the daemons"
                await asyncio.sleep(0.05)
            daemons[0].kill()

            answers = await asyncio.gather(*asking)
            assert [answer.status_code for answer in answers] == [200] * REQUESTS
            assert {answer.json()["choices"][0]["finish_reason"] for answer in answers} == {"length"}
            assert (await ask(client)).status_code == 200
