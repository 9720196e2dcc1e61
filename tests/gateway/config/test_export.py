import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import tomlkit
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from gateway.access.key import has_keys
from gateway.config.export import schema, to_json, to_toml, toml_value
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

DOC = Path(__file__).parents[3] / "docs" / "configuration.md"
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


def keys_of(table: type[Struct]) -> Iterator[tuple[str, str]]:
    """Each key of a table, and its default as the file would spell it; empty if no default can be written."""
    for field in fields(table):
        if field.name in NOT_IN_FILE:
            continue
        default = field.default if field.default_factory is NODEFAULT else field.default_factory()
        is_written = default is not NODEFAULT and default is not None and not isinstance(default, Struct | dict)
        text = tomlkit.item(toml_value(default, field.name)).as_string() if is_written else ""
        yield file_key(field.name), text


@pytest.mark.parametrize(
    ("heading", "table"),
    [
        ("## `[server]`", ServerConfig),
        ("## `[memory]`", MemoryConfig),
        ("## `[media]`", MediaConfig),
        ("## `[batches]`", BatchesConfig),
        ("## `[ui]`", UiConfig),
        ("## `[upstreams.NAME]`", UpstreamConfig),
        ("### `group`", GroupConfig),
        ("### `fallback`", FallbackConfig),
        ("## `[models.NAME]`", ModelConfig),
        ("### `sampling`", SamplingDefaults),
        ("### `thinking`", ThinkingDefaults),
        ("### `profiles`", ProfileConfig),
        ("### `cache`", CacheConfig),
        ("### `tls`", TlsConfig),
    ],
)
def test_the_documentation_has_every_key_with_its_default(heading: str, table: type[Struct]) -> None:
    section = re.split(r"^#", DOC.read_text().partition(heading + "\n")[2], flags=re.MULTILINE)[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.+) \|$", section, flags=re.MULTILINE)
    written = {key: default for key, default, _ in rows}

    assert set(written) == {key for key, _ in keys_of(table)}
    for key, default in keys_of(table):
        if default:
            assert written[key] == f"`{default}`", key
        else:
            assert not written[key].startswith("`"), key


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
    ):
        assert set(made["$defs"][table.__name__]["properties"]) == {key for key, _ in keys_of(table)}
        assert made["$defs"][table.__name__]["additionalProperties"] is False
    drain = made["$defs"]["ServerConfig"]["properties"]["drain"]
    number, text = drain["anyOf"]
    assert number["type"] == "number"
    assert drain["default"] == 30.0
    assert re.match(text["pattern"], "1.5h")
    assert not re.match(text["pattern"], "soon")
    assert "required" not in made["$defs"]["ModelConfig"]


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
