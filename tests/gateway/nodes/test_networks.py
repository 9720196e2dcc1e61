"""Networks that ranks may talk over without encryption, and those that they may not."""

import pytest

from gateway.config.remote_settings import FabricConfig, NodeConfig
from gateway.nodes.networks import Interface, device, exposure, interfaces, trusted_ips

OWN = [
    Interface("lo", "127.0.0.1", "255.0.0.0"),
    Interface("en0", "192.168.1.20", "255.255.255.0"),
    Interface("en5", "192.168.0.1", "255.255.255.252"),
    Interface("wg0", "10.9.0.1", "255.255.255.0"),
    Interface("utun3", "10.8.0.1", "255.255.255.255"),
]


@pytest.mark.parametrize("ip", ["127.0.0.1", "127.0.0.2", "192.168.0.1", "10.9.0.1", "10.8.0.1"])
def test_the_loopback_a_cable_and_a_tunnel_are_trusted(ip: str) -> None:
    assert exposure(ip, OWN) == ""


def test_a_network_that_others_are_in_is_named_with_what_to_do() -> None:
    told = exposure("192.168.1.20", OWN)
    assert told.startswith("192.168.1.20 (en0) is in a network of 256 addresses")
    assert "allow_plain_lan = true" in told


def test_an_address_of_another_machine_is_none_of_ours() -> None:
    assert exposure("192.168.0.2", OWN) == "192.168.0.2 is no address of this machine"


def test_an_open_network_is_used_only_where_the_operator_says_so() -> None:
    fabric = FabricConfig(("192.168.1.20", "192.168.0.1", "192.168.0.2"))
    assert trusted_ips(NodeConfig(fabric=fabric), OWN) == ("127.0.0.1", "192.168.0.1")
    open_too = trusted_ips(NodeConfig(fabric=fabric, allow_plain_lan=True), OWN)
    assert open_too == ("127.0.0.1", "192.168.1.20", "192.168.0.1")


def test_this_machine_has_a_loopback() -> None:
    assert "127.0.0.1" in {each.ip for each in interfaces()}


def test_several_devices_of_a_link_are_one_text() -> None:
    fabric = FabricConfig((), {"a": "rdma_en5", "b": ("rdma_en5", "rdma_en6")})
    assert [device(fabric, name) for name in ("a", "b", "c")] == ["rdma_en5", "rdma_en5,rdma_en6", ""]
