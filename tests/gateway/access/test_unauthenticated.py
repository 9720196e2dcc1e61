import logging
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.key import Key, KeyFile
from gateway.access.rate_limit import (
    ADDRESSES_MAX,
    COUNTED_ADDRESSES_MAX,
    LINES_BY_ADDRESS,
    LINES_IN_ALL,
    LOGGED_ADDRESSES_MAX,
    LogSample,
    Throttle,
)
from gateway.config.address import Address
from gateway.config.settings import ServerConfig
from gateway.errors import RateLimited
from tests.gateway.harness import Gateway, running, until

pytestmark = pytest.mark.anyio

SELF = Address("192.0.2.1", 1)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("h")


@pytest.fixture(scope="module")
def secret(home: Path) -> str:
    return KeyFile(home / "keys" / "keys.json").create(Key(name="k", prefix="", salt="", hash=""))[1]


@pytest.fixture(scope="module")
async def gateway(home: Path, secret: str) -> AsyncGenerator[Gateway, None]:
    """One with keys, behind a proxy that is this test."""
    server = ServerConfig(trusted_proxies=("127.0.0.1",))
    async with running(home, ["--step-ms", "1"], server=server) as running_gateway:
        running_gateway.app.services.throttle.per_minute = 5
        yield running_gateway


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def fields(self) -> list[dict[str, Any]]:
        return [vars(record)["fields"] for record in self.records if "fields" in vars(record)]


@pytest.fixture
def lines() -> Generator[Lines, None, None]:
    handler = Lines()
    logger = logging.getLogger("gateway")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(before)


async def ask(gateway: Gateway, address: str, secret: str = "", path: str = "/v1/models") -> httpx2.Response:
    headers = {"x-forwarded-for": address} | ({"x-api-key": secret} if secret else {})
    return await gateway.client.get(path, headers=headers)


# -- the log ---------------------------------------------------------------------------------------------------------


def test_a_flood_of_one_address_is_a_few_lines_a_minute_and_a_count(lines: Lines) -> None:
    now = [0.0]
    sample = LogSample(lambda: now[0])
    taken = 0
    for _ in range(10):
        taken += sum(sample.takes(SELF) for _ in range(1000))
        now[0] += 60.0
    sample.log_counts()

    assert taken == 10 * LINES_BY_ADDRESS
    assert [line["requests"] for line in lines.fields()] == [1000 - LINES_BY_ADDRESS] * 10
    assert lines.fields()[0]["client"] == "192.0.2.1"


def test_a_flood_of_many_addresses_is_bounded_in_lines_and_memory(lines: Lines) -> None:
    sample = LogSample(lambda: 0.0)
    count = 4 * COUNTED_ADDRESSES_MAX
    taken = sum(sample.takes(Address(f"2001:db8:{number:x}::1", 1)) for number in range(count) for _ in range(2))
    sample.log_counts()

    assert taken == LINES_IN_ALL
    assert len(lines.records) == LOGGED_ADDRESSES_MAX + 1
    assert sum(line["requests"] for line in lines.fields()) == 2 * count - taken


def test_a_minute_in_which_all_lines_were_shown_ends_without_one(lines: Lines) -> None:
    sample = LogSample(lambda: 0.0)
    assert sample.takes(SELF)
    sample.log_counts()

    assert not lines.records


async def test_strangers_are_sampled_and_each_line_of_a_key_is_there(
    gateway: Gateway, secret: str, lines: Lines
) -> None:
    gateway.app.services.sample.log_counts()
    lines.records.clear()
    for number in range(40):
        await ask(gateway, "203.0.113.1", "" if number % 2 else "wrong", "/v1/nope" if number % 3 else "/v1/models")
        await ask(gateway, "203.0.113.1", secret, "/v1/nope")
    await until(lambda: sum("key" in line for line in lines.fields()) == 40)

    strangers = [line for line in lines.fields() if "key" not in line]
    assert len(strangers) == LINES_BY_ADDRESS
    gateway.app.services.sample.log_counts()
    assert lines.fields()[-1] == {"client": "203.0.113.1", "requests": 40 - LINES_BY_ADDRESS}


async def test_a_line_says_from_where_and_a_refused_one_why(
    gateway: Gateway, home: Path, secret: str, lines: Lines
) -> None:
    expired = KeyFile(home / "keys" / "keys.json").create(Key(name="old", prefix="", salt="", hash="", expires=1.0))[1]
    for index, shown in enumerate(("", "wrong", expired, secret)):
        await ask(gateway, f"198.51.100.{index}", shown, "/api/version")
    direct = await gateway.client.get("/api/version", headers={"x-api-key": secret, "x-forwarded-for": "no address"})
    assert direct.status_code == 200
    await until(lambda: sum("outcome" in line for line in lines.fields()) >= 5)

    told = {line["client"]: line["outcome"] for line in lines.fields() if "outcome" in line}
    assert told["198.51.100.0"] == "missing_api_key"
    assert told["198.51.100.1"] == "invalid_api_key"
    assert told["198.51.100.2"] == "expired_api_key"
    assert told["198.51.100.3"] == "ok"
    assert [client.rpartition(":")[0] for client in told if client.startswith("127.")] == ["127.0.0.1"]


async def test_what_comes_over_the_unix_socket_says_so(gateway: Gateway, lines: Lines) -> None:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway.admin), base_url="http://mlxd") as admin:
        assert (await admin.get("/v1/requests/none", headers={"x-forwarded-for": "1.2.3.4"})).status_code == 404
    assert lines.fields()[-1]["client"] == "unix"


# -- failed attempts -------------------------------------------------------------------------------------------------


async def test_an_address_that_fails_often_is_told_to_wait_and_its_valid_keys_are_not(
    gateway: Gateway, secret: str
) -> None:
    before = gateway.metrics.auth_failures["throttled"]
    statuses = [(await ask(gateway, "203.0.113.7", "wrong")).status_code for _ in range(8)]
    slowed = await ask(gateway, "203.0.113.7")

    assert statuses == [401] * 5 + [429] * 3
    assert slowed.status_code == 429
    assert 1 <= int(slowed.headers["retry-after"]) <= 12
    assert slowed.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await ask(gateway, "203.0.113.7", secret)).status_code == 200
    assert (await ask(gateway, "203.0.113.7", path="/livez")).status_code == 200
    # Another address is another matter.
    assert (await ask(gateway, "203.0.113.8", "wrong")).status_code == 401
    assert gateway.metrics.auth_failures["throttled"] == before + 4


async def test_anthropics_clients_are_told_to_wait_in_their_dialect(gateway: Gateway) -> None:
    headers = {"x-forwarded-for": "203.0.113.77"}
    for _ in range(5):
        assert (await gateway.client.post("/v1/messages", headers=headers, json={})).status_code == 401
    slowed = await gateway.client.post("/v1/messages", headers=headers, json={})

    assert slowed.status_code == 429
    assert slowed.json()["error"]["type"] == "rate_limit_error"


async def test_a_client_behind_a_proxy_of_this_machine_is_not_the_owner(tmp_path: Path) -> None:
    async with running(tmp_path, server=ServerConfig(trusted_proxies=("127.0.0.1",))) as gateway:
        assert (await gateway.client.get("/v1/models")).status_code == 200
        assert (await ask(gateway, "127.0.0.1")).status_code == 200
        # Also one whose address the proxy keeps to itself, as Squid does.
        assert (await ask(gateway, "unknown")).status_code == 401
        refused = await ask(gateway, "203.0.113.1")
        assert refused.status_code == 401
        assert "mlxctl keys create" in refused.text


def test_failures_refill_evenly_and_the_table_is_bounded() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0], per_minute=60)

    def failures(address: Address, most: int = 1000) -> int:
        for count in range(most):
            try:
                throttle.fail(address)
            except RateLimited:
                return count
        return most

    assert failures(SELF) == 60
    now[0] = 10.0
    assert failures(SELF) == 10
    # IPv6 addresses of one customer are one.
    assert failures(Address("2001:db8::1", 1), 60) == 60
    assert failures(Address("2001:db8::2", 2)) == 0
    for number in range(2 * ADDRESSES_MAX):
        throttle.fail(Address(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 1))
    assert len(throttle._buckets) == ADDRESSES_MAX  # pyright: ignore[reportPrivateUsage]
