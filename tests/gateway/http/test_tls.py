"""TLS of the listener, over real sockets, on the loop that the daemon runs on."""

import asyncio
import contextlib
import json
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from websockets.asyncio.client import connect

from gateway.access.key import has_keys
from gateway.config.certificate import CertificateUnusable, load
from gateway.config.export import to_toml
from gateway.config.load import load_config
from gateway.config.settings import ConfigError, ServerConfig
from gateway.ctl.doctor import machine_facts as doctor
from gateway.http import connection_limits
from gateway.http.connection import PIPELINED_MAX
from gateway.http.connection_limits import ADDRESS_PART
from gateway.reload import Reloader
from gateway.telemetry.prometheus import Exposition
from tests.gateway.harness import DEADLINE_S, Gateway, chat, events, running, until
from tests.support.certificates import HOST, Authority
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

CLOSING = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
LONG = json.dumps(chat(stream=True, max_tokens=1_000_000)).encode()
STREAM = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(LONG), LONG)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority.make(tmp_path)
    made.issue()
    return made


@asynccontextmanager
async def secured(
    authority: Authority,
    *options: str,
    handshake_s: float = 60.0,
    address_part: float = ADDRESS_PART,
    connections_max: int = sys.maxsize,
    **server: Any,
) -> AsyncGenerator[Gateway, None]:
    config = ServerConfig(tls=authority.config, **server)
    async with running(
        authority.folder,
        options,
        server=config,
        handshake_s=handshake_s,
        address_part=address_part,
        connections_max=connections_max,
        verify=authority.client(),
    ) as gateway:
        yield gateway


async def served_certificate(gateway: Gateway, authority: Authority) -> bytes:
    """Certificate that a new connection is shown (DER)."""
    _, writer = await asyncio.open_connection(HOST, gateway.port, ssl=authority.client())
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return shown


# -- serving ---------------------------------------------------------------------------------------------------------


async def test_a_websocket_over_tls(authority: Authority) -> None:
    body = {"type": "response.create", "model": "m", "input": "hi", "max_output_tokens": 3, "user": "x" * 300_000}
    async with secured(authority) as gateway:
        url = f"wss://{HOST}:{gateway.port}/v1/responses"
        async with connect(url, ssl=authority.client(), max_size=None, open_timeout=patient(10)) as connection:
            await connection.send(json.dumps(body))
            async with asyncio.timeout(patient(DEADLINE_S)):
                while (event := json.loads(await connection.recv()))["type"] != "response.incomplete":
                    assert event["type"] != "error", event
            gateway.app.drain()
            await connection.wait_closed()

    assert event["response"]["output"][0]["content"][0]["text"] == "t0 t1 t2 "
    assert connection.close_code == 1001


async def test_the_openai_sdk_streams_over_tls(authority: Authority) -> None:
    async with secured(authority) as gateway:
        http = httpx2.AsyncClient(verify=authority.client())
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", http_client=http) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True
            )
            finishes = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
        whole = await gateway.client.post("/v1/chat/completions", json=chat())

    assert gateway.url.startswith("https://")
    assert finishes[-1] == "length"
    assert whole.status_code == 200


async def test_tls_speaks_1_2_and_later_and_names_http_1_1(authority: Authority) -> None:
    async with secured(authority) as gateway:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = authority.client()
            context.maximum_version = version
            context.set_alpn_protocols(["h2", "http/1.1"])
            _, writer = await asyncio.open_connection(HOST, gateway.port, ssl=context)
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            writer.close()
        old = authority.client()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(HOST, gateway.port, ssl=old)


async def test_a_client_that_leaves_its_stream_frees_its_place_and_nothing_is_logged(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(authority, "--step-ms", "5") as gateway:
        for shut in (False, True):
            reader, writer = await asyncio.open_connection(HOST, gateway.port, ssl=authority.client())
            writer.write(STREAM)
            assert b" 200 " in await reader.readline()
            # With close_notify, and without.
            writer.transport.abort() if shut else writer.close()
            await until(lambda: gateway.metrics.connections["public"]() == 0)
            await until(lambda: gateway.link.in_flight == 0)

    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("last", [b"", CLOSING], ids=["kept", "closing"])
async def test_a_client_that_takes_nothing_is_cut_off_over_tls(
    authority: Authority, last: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", patient(0.5))
    async with secured(authority) as gateway:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, (HOST, gateway.port))
        # It pauses when its reader is full.
        _, writer = await asyncio.open_connection(sock=raw, ssl=authority.client(), server_hostname=HOST, limit=1024)
        writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * (PIPELINED_MAX // 2) + last)
        await until(lambda: gateway.metrics.connections_dropped["write_timeout"] == 1)
        await until(lambda: gateway.metrics.connections["public"]() == 0)
        writer.transport.abort()


# -- handshakes ------------------------------------------------------------------------------------------------------


async def test_a_handshake_that_does_not_end_is_counted_as_a_connection_and_cut_off(authority: Authority) -> None:
    async with secured(authority, handshake_s=1.0) as gateway:
        reader, writer = await asyncio.open_connection(HOST, gateway.port)
        # The first half of a record.
        writer.write(b"\x16\x03\x01\x02\x00\x01")
        await until(lambda: gateway.metrics.connections["public"]() == 1)
        async with asyncio.timeout(patient(DEADLINE_S)):
            with contextlib.suppress(ConnectionError):
                assert await reader.read(-1) == b""
        writer.close()
        assert gateway.metrics.connections_dropped == {"handshake": 1}
        assert gateway.metrics.connections["public"]() == 0


async def test_handshakes_that_do_not_end_give_way_to_clients(authority: Authority) -> None:
    async with secured(authority, connections_max=3, address_part=1) as gateway:
        idle = [await asyncio.open_connection(HOST, gateway.port) for _ in range(3)]
        await until(lambda: gateway.metrics.connections["public"]() == 3)

        assert (await gateway.client.get("/livez")).status_code == 200

        assert gateway.metrics.connections_dropped == {"idle": 1}
        assert gateway.metrics.connections["public"]() == 3
        assert await idle[0][0].read(-1) == b""
        for _, writer in idle:
            writer.close()


async def test_plain_http_to_a_tls_port_ends_at_once_and_is_not_logged(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(authority) as gateway:
        for _ in range(3):
            reader, writer = await asyncio.open_connection(HOST, gateway.port)
            writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            async with asyncio.timeout(patient(DEADLINE_S)):
                with contextlib.suppress(ConnectionError):
                    assert not (await reader.read(-1)).startswith(b"HTTP/")
            writer.close()
        await until(lambda: gateway.metrics.connections_dropped["handshake"] == 3)
        await until(lambda: gateway.metrics.connections["public"]() == 0)
        assert 'mlxd_connections_dropped_total{reason="handshake"} 3.0' in Exposition(gateway.metrics).text().decode()

    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- a new certificate -----------------------------------------------------------------------------------------------


async def test_a_renewed_certificate_is_shown_to_new_connections_while_a_stream_goes_on(authority: Authority) -> None:
    old = load(authority.certificate, authority.key)
    async with secured(authority, "--step-ms", "2") as gateway:
        before = await served_certificate(gateway, authority)
        async with gateway.client.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=500)) as s:
            lines = s.aiter_lines()
            first = await anext(lines)
            renewed = authority.issue(days=90)
            path = authority.folder / "mlxd.toml"
            path.write_text(f"[server]\ntls = {inline(authority)}\n[models.m]\n")
            # As SIGHUP and `mlxctl config reload` do.
            done = await Reloader(gateway.app, lambda: load_config(authority.folder, has_keys=has_keys)).reload()
            shown = await served_certificate(gateway, authority)
            rest = [line async for line in lines]

        assert before != renewed
        assert shown == renewed
        assert done.needs_restart == []
        found = events("\n\n".join(line for line in [first, *rest] if line))
        assert found[-1] == "[DONE]"
        assert found[-2]["choices"][0]["finish_reason"] == "length"
        text = Exposition(gateway.metrics).text().decode()
        assert 'mlxd_tls_certificate_loads_total{outcome="ok"} 1.0' in text
        expiry = float(text.partition("\nmlxd_tls_certificate_expiry_timestamp_seconds ")[2].split("\n")[0])
        assert 59 < (expiry - old.expires) / 86400 < 61


async def test_bad_new_files_change_nothing_and_are_told_of_once(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with secured(authority) as gateway:
        tls = gateway.app.services.tls
        assert tls is not None
        before = await served_certificate(gateway, authority)
        key = authority.key.read_bytes()

        renewed = authority.issue()
        new_key = authority.key.read_bytes()
        # The certificate is there and its key is not yet.
        authority.key.write_bytes(key)
        await tls.refresh()
        await tls.refresh()
        assert await served_certificate(gateway, authority) == before
        assert gateway.metrics.certificate_loads == {"failed": 1}
        messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(messages) == 1
        assert "is not that of the certificate" in messages[0]

        authority.key.write_bytes(new_key)
        await tls.refresh()
        assert await served_certificate(gateway, authority) == renewed
        assert gateway.metrics.certificate_loads == {"failed": 1, "ok": 1}

        authority.certificate.unlink()
        await tls.refresh()
        assert await served_certificate(gateway, authority) == renewed


# -- the configuration -----------------------------------------------------------------------------------------------


def inline(authority: Authority) -> str:
    return f'{{ certificate = "{authority.certificate.name}", key = "{authority.key.name}" }}'


def refusal(authority: Authority, tls: str | None = None) -> str:
    (authority.folder / "mlxd.toml").write_text(f"[server]\nport = 0\ntls = {tls or inline(authority)}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(authority.folder, has_keys=has_keys)
    assert caught.value.line == 3
    return str(caught.value)


def test_the_files_are_named_relative_to_the_configuration_and_read_back(authority: Authority) -> None:
    path = authority.folder / "mlxd.toml"
    path.write_text(f"[server]\ntls = {inline(authority)}\n[models.m]\n")
    config = load_config(authority.folder, has_keys=has_keys)
    assert config.server.tls == authority.config

    path.write_text(to_toml(config))
    assert load_config(authority.folder, has_keys=has_keys) == config
    path.write_text(f"[models.m]\n[server.tls]\ncertificate = '{authority.certificate}'\nkey = '{authority.key}'\n")
    assert load_config(authority.folder, has_keys=has_keys) == config


def test_one_of_two_files_is_an_error(authority: Authority) -> None:
    assert "needs both certificate and key" in refusal(authority, '{ certificate = "fullchain.pem" }')
    assert "needs both certificate and key" in refusal(authority, '{ key = "key.pem" }')
    assert "unknown key 'cert'" in refusal(authority, '{ cert = "fullchain.pem" }')


def test_files_that_are_not_there_or_hold_something_else_are_an_error(authority: Authority) -> None:
    assert "cannot read" in refusal(authority, '{ certificate = "fullchain.pem", key = "nowhere.pem" }')
    assert "holds no certificate" in refusal(authority, '{ certificate = "key.pem", key = "key.pem" }')
    assert "no usable certificate and key" in refusal(
        authority, '{ certificate = "fullchain.pem", key = "fullchain.pem" }'
    )
    authority.certificate.write_bytes(bytes(range(256)))
    assert "is no PEM file" in refusal(authority)


def test_the_key_of_another_certificate_is_an_error(authority: Authority) -> None:
    certificate = authority.certificate.read_bytes()
    authority.issue()
    authority.certificate.write_bytes(certificate)
    assert "is not that of the certificate" in refusal(authority)


def test_a_certificate_out_of_its_time_is_an_error(authority: Authority) -> None:
    authority.issue(days=-1, starts=-30)
    assert "expired on 20" in refusal(authority)
    authority.issue(days=30, starts=1)
    assert "is not valid before 20" in refusal(authority)


def test_an_encrypted_key_is_an_error_and_asks_nobody(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(authority.key.read_bytes(), None)
    encrypted = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret"))
    authority.key.write_bytes(encrypted)
    assert "is encrypted" in refusal(authority)


def test_a_certificate_that_is_cut_short_is_an_error_and_no_fault(authority: Authority) -> None:
    lines = authority.certificate.read_text().splitlines()
    for size in (2, 5, len(lines) // 3):
        authority.certificate.write_text("\n".join([*lines[:size], "-----END CERTIFICATE-----", ""]))
        with pytest.raises(CertificateUnusable):
            load(authority.certificate, authority.key)


def test_with_tls_a_key_is_needed_all_the_same_beyond_the_loopback(authority: Authority) -> None:
    (authority.folder / "mlxd.toml").write_text(f'[server]\nhost = "0.0.0.0"\ntls = {inline(authority)}\n')
    with pytest.raises(ConfigError, match="without an API key"):
        load_config(authority.folder, has_keys=has_keys)


async def test_a_key_that_everybody_may_read_is_warned_of(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    authority.key.chmod(0o644)
    async with secured(authority):
        pass
    assert [r.getMessage() for r in caplog.records if "chmod 600" in r.getMessage()]


# -- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_warns_of_a_certificate_that_expires_within_two_weeks(authority: Authority) -> None:
    assert doctor.tls(authority.config).level == "ok"

    authority.key.chmod(0o644)
    assert "chmod 600" in doctor.tls(authority.config).advice

    authority.issue(days=10)
    assert doctor.tls(authority.config).level == "warn"
    assert "renew" in doctor.tls(authority.config).advice

    authority.issue(days=-1, starts=-5)
    assert doctor.tls(authority.config).level == "bad"


# -- the daemon ------------------------------------------------------------------------------------------------------


def test_the_daemon_serves_https_and_takes_a_new_certificate_at_sighup(authority: Authority) -> None:
    with short_home() as home:
        write_config(home, server=f"tls = {{ certificate = '{authority.certificate}', key = '{authority.key}' }}")
        with DaemonProcess(home) as daemon, httpx2.Client(verify=authority.client(), base_url=daemon.url) as client:
            assert daemon.url.startswith("https://")
            assert client.get("/livez").status_code == 200
            with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(home / "run" / "admin.sock"))) as owner:
                assert owner.get("http://mlxd/v1/status").json()["url"] == daemon.url

            renewed = authority.issue()
            daemon.process.send_signal(signal.SIGHUP)
            port = httpx2.URL(daemon.url).port
            assert port is not None
            end = time.monotonic() + patient(DEADLINE_S)
            while shown(port) != renewed and time.monotonic() < end:
                time.sleep(0.05)
            assert shown(port) == renewed
            # The connection from before.
            assert client.get("/livez").status_code == 200


def shown(port: int) -> bytes:
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((HOST, port)))
