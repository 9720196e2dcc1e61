"""A group that cannot work is an error of the configuration that names the line and the reason."""

import json
from pathlib import Path

import pytest

from gateway.config.load import load_config
from gateway.config.settings import Config, ConfigError


def load(home: Path, group: str, extra: str = "", path: str = "absent/model") -> Config:
    (home / "mlxd.toml").write_text(f'[models.big]\npath = "{path}"\n{extra}\ngroup = {{ {group} }}\n')
    return load_config(home, has_keys=lambda _: True)


def test_a_group_is_read_as_it_is_written(tmp_path: Path) -> None:
    model = load(tmp_path, 'nodes = ["local", "local"], parallel = "pipeline", split = [3, 1]').models["big"]
    assert (model.group.nodes, model.group.split) == (("local", "local"), (3, 1))


@pytest.mark.parametrize(
    ("group", "extra", "words"),
    [
        ('nodes = ["local"]', "", "from 2 to 64 ranks"),
        ('parallel = "tensor"', "", "from 2 to 64 ranks"),
        ('nodes = ["studio2", "local"]', "", "the first is 'local'"),
        ('nodes = ["local", "studio2"]', "", "there is no [nodes.studio2]"),
        ('nodes = ["local", "local"], split = [1, 2, 3]', "", "3 numbers for 2 ranks"),
        ('nodes = ["local", "local"], parallel = "pipeline", backend = "nccl"', "", "there is no pipeline over it"),
        ('nodes = ["local", "local"], backend = "jaccl"', "", "ranks of one machine use a ring"),
        ('nodes = ["local", "local"]', 'draft = "small"', "draft is not for a model that several processes run"),
        ('nodes = ["local", "local"]', "deterministic = true", "deterministic is not for"),
        ('nodes = ["local", "local"]', "kv_bits = 8", "kv_bits is not for"),
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


def over(home: Path, group: str, address: str = "10.0.0.2:8486", own: str = "", far: str = "") -> str:
    """The reason for which a group with a rank on another machine is refused; empty where it is not."""
    (home / "studio2.public").write_text("ab" * 32)
    node = f"[node]\nfabric = {{ rdma = {{ {own} }} }}\n" if own else ""
    other = f'[nodes.studio2]\nkey = "studio2.public"\naddress = "{address}"\nfabric = {{ rdma = {{ {far} }} }}\n'
    (home / "mlxd.toml").write_text(f'[models.big]\npath = "absent/model"\ngroup = {{ {group} }}\n{node}{other}')
    try:
        load_config(home, has_keys=lambda _: True)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rank_on_another_machine_needs_the_address_of_its_agent(tmp_path: Path) -> None:
    assert over(tmp_path, 'nodes = ["local", "studio2"]') == ""
    assert "has no address" in over(tmp_path, 'nodes = ["local", "studio2"]', address="")


def test_another_machine_has_one_rank_of_a_group(tmp_path: Path) -> None:
    assert "one rank of a group at most" in over(tmp_path, 'nodes = ["local", "studio2", "studio2"]')


def test_jaccl_without_a_cable_between_two_machines_is_refused(tmp_path: Path) -> None:
    jaccl = 'nodes = ["local", "studio2"], backend = "jaccl"'
    assert over(tmp_path, jaccl, own='studio2 = "rdma_en5"', far='local = "rdma_en5"') == ""
    assert "rank 1 has no device towards rank 0" in over(tmp_path, jaccl, own='studio2 = "rdma_en5"')
