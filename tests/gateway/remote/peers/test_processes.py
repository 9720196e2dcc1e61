"""Peers as processes of their own: over HTTPS of an authority of one's own, killed under a stream, told by `mlxctl`."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.harness import chat, events
from tests.gateway.remote.peers.pairs import key_for
from tests.support.certificates import Authority
from tests.support.ctl import ctl
from tests.support.daemon import DEADLINE_S, DaemonProcess
from tests.support.pool import short_home, tokens
from tests.support.scale import patient

LENGTH = 150
SLOW = ("--step-ms 10",)


class Far(DaemonProcess):
    """A peer that speaks HTTPS only, by a certificate of an authority of its own in its home."""

    def __init__(self, home: Path) -> None:
        authority = Authority.make(home)
        authority.issue()
        authority.ca.cert_pem.write_to_path(str(home / "ca.pem"))
        tls = f'tls = {{ certificate = "{authority.certificate}", key = "{authority.key}" }}'
        (home / "mlxd.toml").write_text(f'[server]\nport = 0\n{tls}\n[models.m]\npath = "demo"\npreload = true\n')
        self.key_file = key_for(home)
        super().__init__(home, *SLOW)

    def table(self, name: str, *, ca: bool = True) -> str:
        """Its table in the configuration of a door."""
        trusted = f'ca = "{self.home}/ca.pem"\n' if ca else ""
        return f'[peers.{name}]\nurl = "{self.url}"\nkey_file = "{self.key_file}"\n{trusted}'


@contextmanager
def far() -> Iterator[Far]:
    with short_home() as home, Far(home) as daemon:
        yield daemon


@contextmanager
def door(*tables: str) -> Iterator[DaemonProcess]:
    """A daemon whose only own model is `own`."""
    with short_home() as home:
        write(home, *tables)
        with DaemonProcess(home, *SLOW) as daemon:
            yield daemon


def write(home: Path, *tables: str) -> None:
    (home / "mlxd.toml").write_text('[server]\nport = 0\n[models.own]\npath = "own"\n' + "".join(tables))


def route(daemon: DaemonProcess, model: str = "") -> dict[str, Any]:
    """The answer of the route that `mlxctl route` asks."""
    transport = httpx.HTTPTransport(uds=str(daemon.home / "run" / "admin.sock"))
    with httpx.Client(transport=transport, base_url="http://mlxd", timeout=patient(DEADLINE_S)) as admin:
        reply = admin.get("/v1/route", params={"model": model})
        return reply.json() if reply.status_code == 200 else {"places": []}


def states(daemon: DaemonProcess) -> dict[str, str]:
    return {place["name"]: place["state"] for place in route(daemon)["places"]}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + patient(DEADLINE_S)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(scope="module")
def peer() -> Iterator[Far]:
    with far() as daemon:
        yield daemon


def test_a_peer_over_https_is_trusted_by_its_own_authority_only(peer: Far) -> None:
    with door(peer.table("b"), peer.table("stranger", ca=False)) as near:
        wait_for(lambda: states(near)["b"] == "up" and states(near)["stranger"] != "not heard of yet")
        reply = near.client.post("/v1/chat/completions", json=chat())
        assert (reply.status_code, reply.headers["x-mlxd-served-by"]) == (200, "b")
        assert reply.json()["choices"][0]["message"]["content"] == tokens(5)
        # The same daemon, but nothing says that it is what it says.
        assert states(near)["stranger"] != "up"
        assert near.client.post("/v1/chat/completions", json=chat(model="stranger/m")).status_code >= 400


def test_mlxctl_route_prints_each_place_its_cost_and_the_reason(peer: Far) -> None:
    with door(peer.table("b")) as near:
        wait_for(lambda: states(near) == {"b": "up"} and bool(route(near, "m")["places"]))
        wait_for(lambda: route(near, "m")["places"][0]["state"] == "ready")
        sentence, head, row = ctl(near.home, "route", "m", "--tokens", "4000").stdout.strip().splitlines()
        assert sentence == "m would be served by the peer b: it is the only place that has the model"
        assert head.split() == ["PLACE", "STATE", "QUEUE", "LOAD", "PREFILL", "COST", "FORM", "NOTE"]
        assert re.fullmatch(r"b +ready +[\d.]+ s +- +(-|\d+/s) +[\d.]+ s +[0-9a-f]{8} +chosen", row.strip())

        own = ctl(near.home, "route", "own").stdout.splitlines()
        assert own[0] == "own would be served here: it is the only place that has the model"
        assert own[-1].rstrip().endswith("does not serve it, or declined it a moment ago")
        assert [place["name"] for place in json.loads(ctl(near.home, "route", "--json").stdout)["places"]] == ["b"]
        unknown = ctl(near.home, "route", "nope")
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "nope" in unknown.stderr


def test_peers_come_and_go_with_the_configuration(peer: Far) -> None:
    with door() as near:
        assert ctl(near.home, "route").stdout.startswith("There are no peers")
        assert near.client.post("/v1/chat/completions", json=chat()).status_code == 404
        write(near.home, peer.table("b"))
        near.process.send_signal(signal.SIGHUP)
        wait_for(lambda: states(near) == {"b": "up"})
        assert near.client.post("/v1/chat/completions", json=chat()).headers["x-mlxd-served-by"] == "b"

        write(near.home)
        done = ctl(near.home, "config", "reload")
        assert done.returncode == 0, done.stderr
        assert states(near) == {}
        assert near.client.post("/v1/chat/completions", json=chat()).status_code == 404


@pytest.mark.soak
def test_a_stream_of_a_peer_process_that_is_killed_goes_on_token_by_token_at_another() -> None:
    with far() as first, far() as second, door(first.table("b"), second.table("c")) as near:
        wait_for(lambda: [place["state"] for place in route(near, "m")["places"]] == ["ready", "ready"])
        text = ""
        body = chat(stream=True, max_tokens=LENGTH)
        with near.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            served_by = reply.headers["x-mlxd-served-by"]
            for line in reply.iter_lines():
                for event in events(line):
                    text += event["choices"][0]["delta"].get("content", "") if event != "[DONE]" else ""
                if len(text) > 30 and first.process.poll() is None and second.process.poll() is None:
                    (first if served_by == "b" else second).kill()
        assert text == tokens(LENGTH)
        metrics = near.client.get("/metrics").text
        lost = f'mlxd_peer_sequences_lost_total{{peer="{served_by}"}} 1.0'
        assert lost in metrics.splitlines()
