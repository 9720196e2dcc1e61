"""A group that cannot work is an error of the configuration that names the line and the reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.load import load_config
from gateway.config.settings import Config, ConfigError
from gateway.config.worker_spec_and_group import worker_spec
from protocol.spec import HostSpec


def load(home: Path, group: str, extra: str = "", path: str = "absent/model") -> Config:
    (home / "mlxd.toml").write_text(f'[models.big]\npath = "{path}"\n{extra}\ngroup = {{ {group} }}\n')
    return load_config(home, has_keys=lambda _: True)


def test_a_group_is_read_as_it_is_written(tmp_path: Path) -> None:
    model = load(tmp_path, 'nodes = ["local", "local"], parallel = "pipeline"').models["big"]
    assert (model.group.nodes, model.group.parallel) == (("local", "local"), "pipeline")


@pytest.mark.parametrize(
    ("group", "extra", "words"),
    [
        ('nodes = ["local"]', "", "from 2 to 64 ranks"),
        ('parallel = "tensor"', "", "from 2 to 64 ranks"),
        ('nodes = ["local", "studio2"]', "", "'studio2' is not 'local'"),
        ('nodes = ["local", "studio2"]', "", "see docs/groups.md"),
        ('nodes = ["local", "local"], hosts = "hosts.json"', "", "hosts.json: No such file"),
        ('nodes = ["local", "local"], launch = {}', "", "unknown key 'launch'"),
        ('nodes = ["local", "local"], parallel = "pipeline", backend = "nccl"', "", "there is no pipeline over it"),
        ('nodes = ["local", "local"], backend = "jaccl"', "", "ranks of one machine use a ring"),
        ('nodes = ["local", "local"]', 'draft = "small"', "draft is not for a model that several processes run"),
        ('nodes = ["local", "local"]', "deterministic = true", "deterministic is not for"),
        ('nodes = ["local", "local"]', "kv_bits = 8", "kv_bits is not for"),
        ('nodes = ["local", "local"]', 'keep_warm = "5m"', "keep_warm is not for"),
        ('nodes = ["local", "local"], parallel = "none"', "", "parallel"),
    ],
)
def test_a_group_that_cannot_work_is_refused_with_its_reason(
    group: str, extra: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"mlxd.toml:\d+") as refused:
        load(tmp_path, group, extra)
    assert words in str(refused.value)


def test_files_that_the_ranks_do_not_divide_are_refused_with_the_number(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    settings = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="num_key_value_heads = 1 cannot be divided by 2 ranks"):
        load(tmp_path, 'nodes = ["local", "local"]', path=str(folder))
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "gemma3_text"}))
    with pytest.raises(ConfigError, match="mlx-lm cannot run 'gemma3_text' pipeline-parallel; it needs one process"):
        load(tmp_path, 'nodes = ["local", "local"]', path=str(folder))


TWO: list[dict[str, Any]] = [{"ssh": "studio1", "ips": ["10.0.0.1"]}, {"ssh": "me@studio2", "ips": ["10.0.0.2"]}]


def over(home: Path, hosts: object, group: str = "") -> str:
    """The reason for which a group of these hosts is refused; empty where it is not."""
    (home / "hosts.json").write_text(json.dumps(hosts))
    try:
        load(home, f'hosts = "hosts.json"{group}')
    except ConfigError as error:
        return str(error)
    return ""


def test_a_host_file_of_mlx_launch_gives_the_ranks_their_hosts(tmp_path: Path) -> None:
    cabled = [TWO[0] | {"rdma": [None, "rdma_en5"]}, TWO[1] | {"rdma": [["rdma_en5", "rdma_en6"], None]}]
    (tmp_path / "hosts.json").write_text(json.dumps({"backend": "jaccl-ring", "envs": ["A=b c"], "hosts": cabled}))
    group = worker_spec(config := load(tmp_path, 'hosts = "hosts.json"'), config.models["big"]).group
    assert group is not None
    assert (group.nodes, group.backend, group.envs) == (("local", "me@studio2"), "jaccl", ("A=b c",))
    assert group.hosts[1] == HostSpec("me@studio2", ("10.0.0.2",), (("rdma_en5", "rdma_en6"), None))
    config = load(tmp_path, 'hosts = "hosts.json", backend = "ring"')
    assert config.models["big"].group.backend == "ring", "the configuration's word counts"


def test_what_mlx_launch_starts_itself_is_a_rank_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([*TWO, {"ssh": "127.0.0.1", "ips": ["10.0.0.1"]}]))
    config = load(tmp_path, 'hosts = "hosts.json"', extra='memory = "8GiB"')
    assert config.models["big"].group.ranks == ("local", "me@studio2", "local")
    group = worker_spec(config, config.models["big"]).group
    assert group is not None
    assert group.memory_bytes == 8 << 30


@pytest.mark.parametrize(
    ("hosts", "group", "words"),
    [
        (TWO, "", ""),
        ([*TWO, TWO[1]], "", ""),
        (TWO[:1], "", "from 2 to 64 ranks"),
        ("studio2", "", "is no host file of mlx.launch"),
        ([TWO[0], {"ips": ["10.0.0.2"]}], "", "is no host file of mlx.launch"),
        ([TWO[0], {"ssh": "studio2"}], "", "has no ips of studio2"),
        ([TWO[0], {"ssh": "studio2", "ips": ["studio2"]}], "", "which is no IPv4 address"),
        ([TWO[0], {"ssh": "-oProxyCommand=x", "ips": ["10.0.0.2"]}], "", "a destination such as"),
        ([TWO[0], {"ssh": "local", "ips": ["10.0.0.2"]}], "", "a destination such as"),
        ([TWO[0], {"ssh": "studio2", "ips": ["10.0.0.2", "10.0.1.2"]}], "", "as many ips as every other"),
        ([TWO[0], TWO[1] | {"rdma": ["rdma_en5"]}], "", "1 rdma entries of me@studio2 for 2 hosts"),
        ([TWO[0], TWO[1] | {"rdma": [None, "rdma_en5"]}], "", "its own place in rdma is null"),
        (TWO, ', backend = "jaccl"', "JACCL needs the devices of 2 ranks"),
        ([*TWO, TWO[1]], ', backend = "jaccl"', "JACCL connects machines"),
        (TWO, ', nodes = ["local", "local"]', "give one of them"),
        ({"backend": "mpi", "hosts": TWO}, "", "the backend 'mpi', which is none of"),
        ({"envs": ["A"], "hosts": TWO}, "", "NAME=VALUE is expected"),
        ({"envs": ["A=b\nC=d"], "hosts": TWO}, "", "NAME=VALUE is expected"),
        ({"envs": ["MLX_RANK=1"], "hosts": TWO}, "", "which mlxd sets itself"),
        ({"envs": ["A=" + "b" * 4096], "hosts": TWO}, "", "more than 4096 bytes"),
    ],
)
def test_hosts_that_cannot_be_a_group_are_refused_with_their_reason(
    hosts: object, group: str, words: str, tmp_path: Path
) -> None:
    reason = over(tmp_path, hosts, group)
    assert words in reason if words else reason == ""


def test_a_cable_that_is_missing_is_named(tmp_path: Path) -> None:
    cabled = [TWO[0] | {"rdma": [None, "rdma_en5"]}, TWO[1] | {"rdma": [None, None]}]
    assert "rank 1 has no device towards rank 0" in over(tmp_path, cabled, ', backend = "jaccl"')


@pytest.mark.parametrize("table", ['[node]\nlisten = "10.0.0.1:8486"', '[nodes.studio2]\nkey = "keys/studio2.public"'])
def test_the_tables_of_agents_are_refused_with_the_page_that_tells_of_ssh(table: str, tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text(f"[models.m]\n{table}\n")
    with pytest.raises(ConfigError, match=r"mlxd.toml:2: \[nodes?\] is gone: ranks .* over ssh.*docs/groups\.md"):
        load_config(tmp_path, has_keys=lambda _: True)
