"""`[node]` and `[nodes.NAME]`: fabrics, files of mlx.distributed_config, and all that is refused with its line."""

import json
from pathlib import Path

import pytest

from gateway.access.key_file import has_keys
from gateway.config.load import load_config
from gateway.config.node_tables import LOCAL, fabrics_of
from gateway.config.remote_settings import FabricConfig
from gateway.config.settings import Config, ConfigError

KEY = "ab" * 32
HOSTS = {
    "backend": "jaccl",
    "envs": [],
    "hosts": [
        {"ssh": "me@studio1.local", "ips": ["192.168.0.1"], "rdma": [None, "rdma_en5"]},
        {"ssh": "studio2", "ips": ["192.168.0.2"], "rdma": [["rdma_en5", "rdma_en6"], None]},
    ],
}


def load(folder: Path, text: str) -> Config:
    (folder / "studio2.public").write_text(f"{KEY}\n")
    (folder / "mlxd.toml").write_text(f'[models.m]\n[server]\nnode = "studio1"\n{text}')
    return load_config(folder, has_keys=has_keys)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    assert caught.value.line is not None
    return str(caught.value)


def test_a_node_has_an_address_a_key_and_a_fabric(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        '[node]\nlisten = "10.0.0.1:8486"\n[nodes.studio2]\naddress = "studio2.local:8486"\nkey = "studio2.public"\n'
        'fabric = { ips = ["192.168.0.2"], rdma = { local = "rdma_en5" } }\n',
    )
    node = config.nodes["studio2"]
    assert (node.address, node.key) == ("studio2.local:8486", str(tmp_path / "studio2.public"))
    assert node.fabric == FabricConfig(("192.168.0.2",), {"local": "rdma_en5"})
    assert config.node.listen == "10.0.0.1:8486"
    assert not config.node.allow_plain_lan


def test_fabrics_come_from_a_file_of_mlx_distributed_config(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(HOSTS))
    config = load(tmp_path, '[node]\nhostfile = "f.json"\n[nodes.studio2]\nkey = "studio2.public"\n')
    assert config.node.fabric == FabricConfig(("192.168.0.1",), {"studio2": "rdma_en5"})
    assert config.nodes["studio2"].fabric == FabricConfig(("192.168.0.2",), {LOCAL: ("rdma_en5", "rdma_en6")})


def test_a_list_of_hosts_is_a_hostfile_as_well() -> None:
    fabrics = fabrics_of(json.dumps([{"ssh": "10.0.0.7", "ips": ["10.0.0.7"]}, {"ssh": "localhost"}]).encode(), "x")
    assert fabrics == {"10.0.0.7": FabricConfig(("10.0.0.7",)), "localhost": FabricConfig(), LOCAL: FabricConfig()}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[nodes.studio2]\n", "a node needs key"),
        ('[nodes.studio2]\nkey = "nope.public"\n', "nope.public"),
        ('[nodes.studio2]\nkey = "mlxd.toml"\n', "holds no public key"),
        ('[nodes.studio2]\nkey = "studio2.public"\naddress = "studio2"\n', "must be HOST:PORT"),
        ('[nodes.studio2]\nkey = "studio2.public"\naddress = "studio2:0"\n', "no port"),
        ('[nodes.studio2]\nkey = "studio2.public"\naddress = "[::1]:8486"\n', "no host name or IPv4"),
        ('[nodes.studio2]\nkey = "studio2.public"\ncommand = "rm"\n', "unknown key 'command'"),
        ('[nodes.studio2]\nkey = "studio2.public"\nfabric = { ips = ["studio2"] }\n', "no IPv4 address"),
        ('[nodes.studio2]\nkey = "studio2.public"\nfabric = { wires = 2 }\n', "unknown key 'wires'"),
        ('[nodes.local]\nkey = "studio2.public"\n', "is this machine"),
        ('[nodes.a]\nkey = "studio2.public"\n[nodes.b]\nkey = "studio2.public"\n', "that of node 'a'"),
        ('[node]\nlisten = "8486"\n', "must be HOST:PORT"),
        ('[node]\nhostfile = "mlxd.toml"\n', "no file of mlx.distributed_config"),
    ],
)
def test_what_cannot_be_a_node_is_an_error_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    assert told in refusal(tmp_path, text)


def test_a_hostfile_whose_matrix_is_not_square_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 rdma entries for 2 hosts"):
        fabrics_of(b'[{"ssh": "a", "rdma": ["rdma_en2"]}, {"ssh": "b"}]', "a")
