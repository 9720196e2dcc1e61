import pytest

from gateway.config.address import HOPS_MAX, UNKNOWN, Address, Proxies, invalid_proxy_reason


def scope(peer: tuple[str, int] | None, *forwarded: str) -> dict[str, object]:
    return {"type": "http", "client": peer, "headers": [(b"x-forwarded-for", line.encode()) for line in forwarded]}


PEER = ("127.0.0.1", 5000)


@pytest.mark.parametrize(
    ("address", "text", "network"),
    [
        (Address("192.0.2.7", 80), "192.0.2.7:80", "192.0.2.7"),
        (Address("2001:db8:1:2:3:4:5:6", 80), "[2001:db8:1:2:3:4:5:6]:80", "2001:db8:1:2::/64"),
        (Address("fe80::1%eth0", 80), "[fe80::1%eth0]:80", "fe80::/64"),
        (Address("2001:db8::1", is_forwarded=True), "2001:db8::1", "2001:db8::/64"),
        (Address("unix"), "unix", "unix"),
        (UNKNOWN, "", ""),
    ],
)
def test_an_address_is_written_and_grouped_by_its_family(address: Address, text: str, network: str) -> None:
    assert (str(address), address.network) == (text, network)


@pytest.mark.parametrize(
    ("lines", "client"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        # What the client itself wrote stands before what the proxies have added.
        (["10.9.9.9, 203.0.113.9"], "203.0.113.9"),
        (["1.1.1.1", "203.0.113.9, 10.0.0.2", "10.0.0.3"], "203.0.113.9"),
        (["203.0.113.9:4711"], "203.0.113.9"),
        (["[2001:db8::9]:4711"], "2001:db8::9"),
        (["2001:DB8:0::9"], "2001:db8::9"),
        (["::ffff:203.0.113.9"], "203.0.113.9"),
    ],
)
def test_behind_trusted_proxies_the_client_is_the_last_address_before_them(lines: list[str], client: str) -> None:
    found = Proxies(("127.0.0.1", "10.0.0.0/29")).client(scope(PEER, *lines))

    assert found == Address(client, is_forwarded=True)


@pytest.mark.parametrize(
    "line",
    ["", "unknown", "evil\x1b[31m", "203.0.113.9, _hidden", "203.0.113.9,", "fe80::1%0", "1.2.3.4.5", "a" * 5000],
)
def test_what_tells_no_address_leaves_that_of_the_connection_which_is_not_the_clients(line: str) -> None:
    found = Proxies(("127.0.0.1", "10.0.0.0/29")).client(scope(PEER, line))

    assert found == Address(*PEER, is_hidden=True)
    assert not found.is_own


@pytest.mark.parametrize(
    "lines", [[], ["127.0.0.1"], ["10.0.0.2, 127.0.0.1"], ["203.0.113.9, " + ", ".join(["10.0.0.2"] * HOPS_MAX)]]
)
def test_where_all_are_proxies_the_client_is_that_of_the_connection(lines: list[str]) -> None:
    found = Proxies(("127.0.0.1", "10.0.0.0/29")).client(scope(PEER, *lines))

    assert found == Address(*PEER)
    assert found.is_own


def test_the_header_of_anybody_else_is_ignored() -> None:
    assert Proxies(()).client(scope(PEER, "203.0.113.9")) == Address(*PEER)
    assert Proxies(("10.0.0.1",)).client(scope(PEER, "203.0.113.9")) == Address(*PEER)
    assert Proxies(("::1",)).client(scope(("::1", 9), "203.0.113.9")).host == "203.0.113.9"
    assert Proxies(("127.0.0.1",)).client(scope(None, "203.0.113.9")) == UNKNOWN


def test_a_proxy_is_an_address_or_a_network() -> None:
    assert [invalid_proxy_reason(good) for good in ("127.0.0.1", "::1", "10.0.0.0/8")] == [None] * 3
    for bad in ("", "localhost", "10.0.0.1/8", "127.0.0.1:80", "*", "unix"):
        assert invalid_proxy_reason(bad), bad
