"""Environments of ring, JACCL and NCCL: as MLX's own launcher makes them."""

import json

from mlx._distributed_utils.common import Host, Hostfile  # pyright: ignore[reportMissingTypeStubs]

from protocol.collectives import VARIABLES, broken_ring_reason, environment, has_mesh

LINKS = [["10.0.0.1:5000"], ["10.0.0.2:5000"]]
MESH = [[None, "rdma_en5", "rdma_en4"], ["rdma_en5", None, "rdma_en3"], ["rdma_en4", "rdma_en3", None]]


def test_a_ring_has_the_links_of_all_ranks_in_its_hostfile() -> None:
    made = environment("ring", 1, LINKS, [], "")

    assert made.variables == {"MLX_RANK": "1"}
    assert json.loads(made.files["MLX_HOSTFILE"]) == LINKS


def test_the_matrix_of_a_mesh_is_the_one_of_mlx_launch() -> None:
    made = environment("jaccl", 2, [], MESH, "10.0.0.1:7000")
    hosts = [Host(rank, "h", [], row) for rank, row in enumerate(MESH)]
    launched = [host.rdma for host in Hostfile(hosts).hosts]

    assert made.variables == {"MLX_RANK": "2", "MLX_JACCL_COORDINATOR": "10.0.0.1:7000"}
    assert json.loads(made.files["MLX_IBV_DEVICES"]) == launched


def test_several_devices_of_a_link_are_a_list() -> None:
    devices = [[None, ["rdma_en5", "rdma_en6"]], [["rdma_en5", "rdma_en6"], None]]
    made = environment("jaccl", 0, [], devices, "10.0.0.1:7000")
    assert json.loads(made.files["MLX_IBV_DEVICES"])[0] == [None, ["rdma_en5", "rdma_en6"]]


def test_four_machines_in_a_circle_are_a_ring_of_jaccl_and_no_mesh() -> None:
    circle = [["rdma_en2" if (one - other) % 4 in (1, 3) else None for other in range(4)] for one in range(4)]

    made = environment("jaccl", 0, [], circle, "10.0.0.1:7000")

    assert not has_mesh(circle)
    assert made.variables["MLX_JACCL_RING"] == "1"


def test_a_missing_cable_is_named() -> None:
    broken = [[None, "rdma_en5", None], ["rdma_en5", None, None], [None, "rdma_en3", None]]
    assert broken_ring_reason(broken) == "JACCL: rank 0 has no device towards rank 2"


def test_nccl_has_the_address_of_rank_0() -> None:
    made = environment("nccl", 3, LINKS * 2, [], "10.0.0.1:9000")
    assert made.files == {}
    assert made.variables == {
        "MLX_RANK": "3",
        "MLX_WORLD_SIZE": "4",
        "NCCL_HOST_IP": "10.0.0.1",
        "NCCL_PORT": "9000",
    }


def test_every_variable_that_is_set_is_also_one_that_is_unset_for_the_others() -> None:
    made = [
        environment("ring", 0, LINKS, [], ""),
        environment("jaccl", 0, [], MESH, "10.0.0.1:7000"),
        environment("nccl", 0, LINKS, [], "10.0.0.1:7000"),
    ]
    assert {name for each in made for name in (*each.variables, *each.files)} <= set(VARIABLES)
