import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
from msgspec import Struct
from msgspec.structs import fields

from gateway.access.key import has_keys
from gateway.config.export import schema, to_json, to_toml
from gateway.config.load import load_config
from gateway.config.settings import (
    NOT_IN_FILE,
    BatchesConfig,
    CacheConfig,
    FallbackConfig,
    GroupConfig,
    MediaConfig,
    MemoryConfig,
    ModelConfig,
    ProfileConfig,
    SamplingDefaults,
    ServerConfig,
    ThinkingDefaults,
    TlsConfig,
    UiConfig,
    UpstreamConfig,
    file_key,
)
from tests.support.ctl import ctl

GOOD = """
[server]
drain = "90s"
max_body = "1MiB"
request_timeout = 0.25
default = "default:exact"
small = "plain"
cors = ["https://a.example"]

[models."org/m-1.5"]
aliases = ["default", "a-*"]
sampling = { temperature = 0.7, top_k = 20 }
cache = { ram = "8GiB", disk = 0 }
chat_template = "{{ messages }}\\n"
thinking = { effort = "low" }
[models."org/m-1.5".profiles.exact]
sampling = { temperature = 0 }
thinking = { enabled = false, budget = 10 }
[models."org/m-1.5".profiles.as_it_is]

[models.plain]
path = "./quo\\"ted\\\\path é"
"""


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-such-hub"))


def test_what_show_prints_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mlxd.toml"
    path.write_text(GOOD)
    config = load_config(tmp_path, path, has_keys=has_keys)

    path.write_text(to_toml(config))

    assert load_config(tmp_path, path, has_keys=has_keys) == config
    assert tomllib.loads(path.read_text())["server"]["drain"] == "90s"
    assert tomllib.loads(path.read_text())["server"]["max_body"] == "1MiB"


def test_tables_of_other_machines_read_back_as_well(tmp_path: Path) -> None:
    hosts = [{"ssh": "studio1", "ips": ["192.168.0.1"]}, {"ssh": "me@studio2", "ips": ["192.168.0.2"]}]
    (tmp_path / "hosts.json").write_text(json.dumps({"backend": "ring", "envs": ["A=b"], "hosts": hosts}))
    path = tmp_path / "mlxd.toml"
    path.write_text(
        """
[upstreams.or]
url = "https://a.example/v1"
models = { big = "z-ai/glm", "x.y" = "z" }
[models.big]
path = "absent/model"
group = { hosts = "hosts.json" }
"""
    )
    config = load_config(tmp_path, path, has_keys=has_keys)

    path.write_text(to_toml(config))

    assert load_config(tmp_path, path, has_keys=has_keys) == config
    assert config.models["big"].group.ranks == ("local", "me@studio2")
    assert config.models["big"].group.backend == "ring"


def test_without_a_file_show_names_the_demo_model(tmp_path: Path) -> None:
    config = load_config(tmp_path, has_keys=has_keys)

    assert list(to_json(config)["models"]) == ["demo", "demo-vision"]  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert "[models.demo]" in to_toml(config)


def keys_of(table: type[Struct]) -> set[str]:
    return {file_key(field.name) for field in fields(table) if field.name not in NOT_IN_FILE}


def test_the_schema_has_the_keys_of_the_file_and_allows_units() -> None:
    made = schema()

    assert set(made["properties"]) == {
        "server",
        "memory",
        "media",
        "batches",
        "ui",
        "models",
        "upstreams",
    }
    for table in (
        ServerConfig,
        MemoryConfig,
        MediaConfig,
        BatchesConfig,
        UiConfig,
        ModelConfig,
        SamplingDefaults,
        ThinkingDefaults,
        ProfileConfig,
        CacheConfig,
        TlsConfig,
        FallbackConfig,
        GroupConfig,
        UpstreamConfig,
    ):
        assert set(made["$defs"][table.__name__]["properties"]) == keys_of(table)
        assert made["$defs"][table.__name__]["additionalProperties"] is False
    drain = made["$defs"]["ServerConfig"]["properties"]["drain"]
    number, text = drain["anyOf"]
    assert number["type"] == "number"
    assert drain["default"] == 30.0
    assert re.match(text["pattern"], "1.5h")
    assert not re.match(text["pattern"], "soon")
    assert "required" not in made["$defs"]["ModelConfig"]
    assert not re.search(r'\w_(s|bytes)"', json.dumps(made)), "a name of a field in place of a key"


def test_the_schema_describes_each_key_by_the_comment_above_its_field() -> None:
    tables = schema()["$defs"]

    assert tables["ServerConfig"]["properties"]["port"]["description"] == "TCP port; 0 takes a free one."
    # A comment of two lines, above a key that may be text with a unit.
    assert re.fullmatch(r"[^#]+\. See docs/[a-z]+\.md\.", tables["ModelConfig"]["properties"]["memory"]["description"])
    for name in ("ServerConfig", "ModelConfig", "MemoryConfig", "UpstreamConfig", "SamplingDefaults"):
        assert all("description" in body for body in tables[name]["properties"].values())


def test_the_schema_takes_what_is_good_and_refuses_what_is_not() -> None:
    validator = jsonschema.Draft202012Validator(schema())

    def faults(text: str) -> list[str]:
        return [error.message for error in validator.iter_errors(tomllib.loads(text))]

    assert faults(GOOD) == []
    assert faults("[server]\nprot = 1") != []
    assert faults("[models.a.profiles.x]\ntemperature = 1") != []
    assert faults('[models.a]\nthinking = { effort = "vast" }') != []


def test_check_says_good_or_the_line_and_the_exit_status_says_it_too(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(GOOD)
    bad.write_text("[server]\n\nprot = 1\n")

    done = ctl(tmp_path, "config", "check", str(good))
    assert (done.returncode, done.stdout) == (0, f"{good}: good, 2 models\n")

    done = ctl(tmp_path, "config", "check", str(bad), "--json")
    assert done.returncode == 2
    said = json.loads(done.stdout)
    assert (said["ok"], said["line"]) == (False, 3)

    done = ctl(tmp_path, "config", "show", str(bad))
    assert done.returncode == 2
    assert f"{bad}:3: unknown key 'prot'" in done.stderr
