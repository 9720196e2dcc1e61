"""Environments of ring, JACCL and NCCL: as MLX's own launcher makes them, and refused where they cannot work."""

import json

import pytest
from mlx._distributed_utils.common import Host, Hostfile  # pyright: ignore[reportMissingTypeStubs]

from protocol.collectives import VARIABLES, CannotConnect, broken_ring_reason, environment, has_mesh

LINKS = [["10.0.0.1:5000"], ["10.0.0.2:5000"]]
MESH = [["", "rdma_en5", "rdma_en4"], ["rdma_en5", "", "rdma_en3"], ["rdma_en4", "rdma_en3", ""]]


def test_a_ring_has_the_links_of_all_ranks_in_its_hostfile() -> None:
    made = environment("ring", 1, 2, links=LINKS)

    assert made.variables == {"MLX_RANK": "1"}
    assert json.loads(made.files["MLX_HOSTFILE"]) == LINKS


def test_the_matrix_of_a_mesh_is_the_one_of_mlx_launch() -> None:
    made = environment("jaccl", 2, 3, devices=MESH, coordinator="10.0.0.1:7000")
    hosts = [Host(rank, "h", [], [name or None for name in row]) for rank, row in enumerate(MESH)]
    launched = [host.rdma for host in Hostfile(hosts).hosts]

    assert made.variables == {"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:7000"}
    assert json.loads(made.files["MLX_IBV_DEVICES"]) == launched


def test_several_devices_of_a_link_are_a_list() -> None:
    devices = [["", "rdma_en5,rdma_en6"], ["rdma_en5,rdma_en6", ""]]
    made = environment("jaccl", 0, 2, devices=devices, coordinator="10.0.0.1:7000")
    assert json.loads(made.files["MLX_IBV_DEVICES"])[0] == [None, ["rdma_en5", "rdma_en6"]]


def test_four_machines_in_a_circle_are_a_ring_of_jaccl_and_no_mesh() -> None:
    circle = [["rdma_en2" if (one - other) % 4 in (1, 3) else "" for other in range(4)] for one in range(4)]

    made = environment("jaccl", 0, 4, devices=circle, coordinator="10.0.0.1:7000")

    assert not has_mesh(circle, 4)
    assert made.variables["MLX_JACCL_RING"] == "1"


def test_a_missing_cable_is_named() -> None:
    broken = [["", "rdma_en5", ""], ["rdma_en5", "", ""], ["", "rdma_en3", ""]]
    assert broken_ring_reason(broken, 3) == "JACCL: rank 0 has no device towards rank 2"
    with pytest.raises(CannotConnect, match="rank 0 has no device towards rank 2"):
        environment("jaccl", 0, 3, devices=broken, coordinator="10.0.0.1:7000")


def test_nccl_has_the_address_of_rank_0() -> None:
    made = environment("nccl", 3, 4, coordinator="10.0.0.1:9000")
    assert made.files == {}
    assert made.variables == {
        "MLX_RANK": "3",
        "MLX_WORLD_SIZE": "4",
        "NCCL_HOST_IP": "10.0.0.1",
        "NCCL_PORT": "9000",
    }


def test_every_variable_that_is_set_is_also_one_that_is_unset_for_the_others() -> None:
    made = [
        environment("ring", 0, 2, links=LINKS),
        environment("jaccl", 0, 3, devices=MESH, coordinator="10.0.0.1:7000"),
        environment("nccl", 0, 2, coordinator="10.0.0.1:7000"),
    ]
    assert {name for each in made for name in (*each.variables, *each.files)} <= set(VARIABLES)


@pytest.mark.parametrize(
    ("backend", "more", "why"),
    [
        ("any", {}, "none of ring, jaccl, nccl"),
        ("ring", {"links": LINKS[:1]}, "has the links of 1"),
        ("ring", {"links": [LINKS[0], LINKS[0]]}, "two links"),
        ("ring", {"links": [LINKS[0], [*LINKS[1], "10.0.0.3:1"]]}, "as many links"),
        ("ring", {"links": [["studio1:5000"], LINKS[1]]}, "not IPV4:PORT"),
        ("ring", {"links": [["10.0.0.1:99999"], LINKS[1]]}, "not IPV4:PORT"),
        ("nccl", {"coordinator": "10.0.0.1"}, "not IPV4:PORT"),
        ("jaccl", {"coordinator": "10.0.0.1:1"}, "devices of 2 ranks"),
    ],
)
def test_what_cannot_connect_is_refused_with_the_reason(backend: str, more: dict[str, object], why: str) -> None:
    with pytest.raises(CannotConnect, match=why):
        environment(backend, 0, 2, **more)  # type: ignore[arg-type]
