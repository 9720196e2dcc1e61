"""The proxy files of `deploy/proxy`, run as they are but for names, paths, ports and sizes, before a real daemon."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.support.certificates import HOST, Authority
from tests.support.daemon import DEADLINE_S, DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patient

FILES = Path(__file__).parents[2] / "deploy" / "proxy"
MAX_BODY = 64 * 1024
PROXIES = ("nginx", "caddy")
# All of 127.0.0.0/8 is there: the client has an address that is not the proxy's.
CLIENT = "127.0.0.2" if sys.platform == "linux" else HOST


@dataclass(frozen=True, slots=True)
class Behind:
    """A daemon, and a client that reaches it through a proxy."""

    daemon: DaemonProcess
    client: httpx2.Client
    port: int
    context: ssl.SSLContext

    def lines(self) -> list[dict[str, object]]:
        """The access log."""
        text = (self.daemon.home / "logs" / "mlxd.log").read_text()
        return [line for line in map(json.loads, text.splitlines()) if "status" in line]

    def metric(self, name: str) -> float:
        text = self.daemon.client.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}\S* (\S+)$", text, flags=re.MULTILINE))


def nginx_file(folder: Path, authority: Authority, text: str) -> list[str]:
    text = re.sub(r"(ssl_certificate +).*;", rf"\1{authority.certificate};", text)
    text = re.sub(r"(ssl_certificate_key +).*;", rf"\1{authority.key};", text)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = f"daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}\n"
    path = folder / "nginx.conf"
    path.write_text(f"{main}http {{\naccess_log off;\n{temporary}{text}}}\n")
    return ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(path)]


def caddy_file(folder: Path, authority: Authority, text: str) -> list[str]:
    tls = f"tls {authority.certificate} {authority.key}"
    options = f"{{\nadmin off\nauto_https disable_redirects\nstorage file_system {folder}\n}}\n"
    path = folder / "Caddyfile"
    path.write_text(options + text.replace("localhost_site {", f"localhost_site {{\n\t{tls}"))
    path.write_text(path.read_text().replace("localhost_site", f"https://{HOST}:@PORT@"))
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(path)]


@contextmanager
def behind(name: str, *options: str, timeout: str = "1h") -> Iterator[Behind]:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    with short_home() as home:
        write_config(home, ("a",), server=f'trusted_proxies = ["{HOST}"]\nmax_body = {MAX_BODY}')
        authority = Authority.make(home)
        authority.issue()
        with DaemonProcess(home, *options) as daemon, socket.socket() as held:
            held.bind((HOST, 0))
            port = held.getsockname()[1]
            command = prepare(name, home, authority, daemon.url, port, timeout)
            held.close()
            with (home / "proxy.log").open("wb") as log:
                env = os.environ | {"XDG_CONFIG_HOME": str(home), "XDG_DATA_HOME": str(home)}
                process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
            try:
                wait_for(lambda: process.poll() is not None or is_open(port))
                assert process.poll() is None, (home / "proxy.log").read_text()
                context = authority.client()
                transport = httpx2.HTTPTransport(verify=context, local_address=CLIENT)
                with httpx2.Client(
                    transport=transport, base_url=f"https://{HOST}:{port}", timeout=patient(DEADLINE_S)
                ) as client:
                    yield Behind(daemon, client, port, context)
            finally:
                process.kill()
                process.wait()


def prepare(name: str, folder: Path, authority: Authority, url: str, port: int, timeout: str) -> list[str]:
    """Write the proxy's file with what is this test's own. Returns the command that runs it."""
    text = (FILES / ("nginx.conf" if name == "nginx" else "Caddyfile")).read_text()
    changes = {
        "127.0.0.1:8484": url.removeprefix("http://"),
        "listen 443 ssl": f"listen {HOST}:{port} ssl",
        "32m;": f"{MAX_BODY};",
        " 1h": f" {timeout}",
        "\nmlx.example.com {": "\nlocalhost_site {",
    }
    for old, new in changes.items():
        text = text.replace(old, new)
    if name == "nginx":
        return nginx_file(folder, authority, text)
    command = caddy_file(folder, authority, text)
    path = Path(command[-1])
    path.write_text(path.read_text().replace("@PORT@", str(port)))
    return command


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + patient(DEADLINE_S)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def body(**fields: object) -> dict[str, object]:
    return {"model": "a", "prompt": "hi", "max_tokens": 3} | fields


@pytest.mark.parametrize("name", PROXIES)
def test_a_stream_comes_in_pieces_and_ends_in_mlxd_when_its_client_leaves(name: str) -> None:
    with behind(name) as at:
        # A stream that would not end: what comes of it is not held back.
        with at.client.stream("POST", "/v1/completions", json=body(stream=True, max_tokens=1_000_000)) as answer:
            assert answer.status_code == 200
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            assert [next(lines) for _ in range(3)]
            assert at.metric("mlxd_num_requests_running") == 1
        wait_for(lambda: at.metric("mlxd_num_requests_running") == 0)


@pytest.mark.parametrize("name", PROXIES)
def test_the_address_of_the_client_and_not_what_it_says_is_in_the_access_log(name: str) -> None:
    with behind(name) as at:
        said = {"x-forwarded-for": "203.0.113.7"}
        assert at.client.post("/v1/completions", json=body(), headers=said).status_code == 200
        wait_for(lambda: bool(at.lines()))
        [line] = at.lines()
        assert str(line["client"]).partition(":")[0] == CLIENT


@pytest.mark.parametrize("name", PROXIES)
def test_connections_to_mlxd_are_kept(name: str) -> None:
    with behind(name) as at:
        for _ in range(5):
            assert at.client.post("/v1/completions", json=body()).status_code == 200
        # The proxy's, and that which asks.
        assert at.metric('mlxd_connections{listener="public"}') == 2


@pytest.mark.parametrize("name", PROXIES)
def test_a_body_that_is_too_large_is_a_413(name: str) -> None:
    with behind(name) as at:
        assert at.client.post("/v1/completions", json=body(prompt="x" * MAX_BODY)).status_code == 413
        assert at.client.post("/v1/completions", json=body()).status_code == 200


@pytest.mark.parametrize("name", PROXIES)
def test_an_offer_to_upgrade_with_a_body_is_one_request(name: str) -> None:
    inner = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    data = inner + json.dumps(body()).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(data)}\r\n"
        "upgrade: h2c\r\nconnection: upgrade, close\r\n\r\n"
    )
    with behind(name) as at:
        with at.context.wrap_socket(socket.create_connection((HOST, at.port)), server_hostname=HOST) as client:
            client.settimeout(patient(DEADLINE_S))
            client.sendall(head.encode() + data)
            said = b"".join(iter(lambda: client.recv(65536), b""))
        assert said.count(b"HTTP/1.1 ") == 1
        # No JSON: the body is what was sent, and nothing of it was a request.
        assert said.startswith(b"HTTP/1.1 400 ")
        wait_for(lambda: bool(at.lines()))
        assert [(line["message"], line["status"]) for line in at.lines()] == [("POST /v1/completions", 400)]


@pytest.mark.parametrize("name", PROXIES)
def test_the_pages_own_origin_is_the_one_of_the_proxy_port_included(name: str) -> None:
    with behind(name) as at:
        codes = [
            at.client.post(
                "/ui/api/session", json={"code": "wrong"}, headers={"origin": f"https://{HOST}:{port}"}
            ).json()["error"]["code"]
            for port in (at.port, at.port + 1)
        ]
    assert codes == ["bad_code", "permission_denied"]


@pytest.mark.parametrize("name", PROXIES)
def test_the_timeouts_of_the_file_bound_a_silence(name: str) -> None:
    # The model that is asked for loads meanwhile.
    options = ("--load-s 1.5",)
    with behind(name, *options) as at:
        assert at.client.post("/v1/completions", json=body(max_tokens=1)).status_code == 200
    with behind(name, *options, timeout="500ms") as at:
        assert at.client.post("/v1/completions", json=body(max_tokens=1)).status_code in (502, 504)
