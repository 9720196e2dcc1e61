import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from gateway.access.key import Key, KeyFile, has_keys
from gateway.api.common.canonical import EFFORTS
from gateway.config.load import load_config
from gateway.config.settings import ConfigError, Effort
from gateway.config.source import parse_duration, parse_size
from gateway.model_files.hub_cache import cached_models
from gateway.state_dir import default_home
from tests.support.scale import scaled

EXAMPLE = """
[server]
host = "127.0.0.1"
port = 9000
drain = "5s"
max_body = "1MiB"
log_level = "DEBUG"

[models.coder]
path = "mlx-community/Qwen3-Coder"
aliases = ["default", "gpt-4o", "claude-*"]
preload = true
sampling = { temperature = 0.7, top_k = 20 }

[models."org/name"]
"""


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-such-hub"))


def load(tmp_path: Path, text: str, **overrides: object):
    path = tmp_path / "mlxd.toml"
    path.write_text(text)
    return load_config(tmp_path, path, **overrides, has_keys=has_keys)  # pyright: ignore[reportArgumentType]


def failure(tmp_path: Path, text: str, **overrides: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **overrides)
    return str(caught.value).replace(str(tmp_path), "")


def test_the_port_of_ollama_is_another_one(tmp_path: Path) -> None:
    assert load(tmp_path, "[server]\nollama_port = 11434").server.ollama_port == 11434
    assert failure(tmp_path, "[server]\nport = 11434\nollama_port = 11434").startswith(
        "/mlxd.toml:3: ollama_port: 11434 is also 'port'"
    )


def test_every_documented_key_is_read(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)

    assert config.server.port == 9000
    assert config.server.drain_s == 5
    assert config.server.max_body_bytes == 1 << 20
    assert config.server.log_level == "debug"
    coder = config.models["coder"]
    assert coder.aliases == ("default", "gpt-4o", "claude-*")
    assert coder.preload
    assert coder.sampling.temperature == 0.7
    assert coder.sampling.top_k == 20
    assert config.models["org/name"].path == "org/name"
    assert config.run_dir == tmp_path / "run"


def test_without_a_file_the_demo_is_served(tmp_path: Path) -> None:
    config = load_config(tmp_path, has_keys=has_keys)

    assert list(config.models) == ["demo", "demo-vision"]
    assert config.models["demo"].path == "demo"
    assert config.models["demo"].aliases == ("default",)
    assert config.models["demo"].preload, "there is no other model to wait for"


def test_without_a_file_the_hugging_face_cache_is_served_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    _fake_repo(hub, "org--good", _WHOLE)
    _fake_repo(hub, "org--no-weights", {"config.json": _CONFIG, "tokenizer.json": ""})
    _fake_repo(
        hub, "org--bert", {"config.json": '{"model_type": "b", "architectures": ["BertModel"]}', "m.safetensors": ""}
    )
    _fake_repo(hub, "org--broken", {"config.json": "{", "model.safetensors": ""})

    assert cached_models() == ["org/good"]
    models = load_config(tmp_path, has_keys=has_keys).models
    assert list(models) == ["demo", "demo-vision", "org/good"]
    assert not any(model.preload for model in models.values())


_CONFIG = '{"model_type": "qwen3"}'
_WHOLE = {"config.json": _CONFIG, "tokenizer.json": "", "model.safetensors": ""}
_SHARDS = '{"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}'


@pytest.mark.parametrize(
    ("names", "is_listed"),
    [
        (["model.safetensors", "tokenizer.json"], True),
        (["model.safetensors", "vocab.json", "merges.txt"], True),
        (["model.safetensors", "sentencepiece.bpe.model"], True),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors", "tokenizer.model"], True),
        (["model-1-of-2.safetensors", "tokenizer.json"], False),
        (["tokenizer.json"], False),
        (["consolidated.safetensors", "tokenizer.json"], False),
        (["weights.00.safetensors", "tokenizer.json"], False),
        (["._model.safetensors", "tokenizer.json"], False),
        (["mlx/model.safetensors", "tokenizer.json"], False),
        (["model.safetensors"], False),
        (["model.safetensors", "tokenizer_config.json"], False),
    ],
)
def test_only_what_can_be_loaded_is_served_from_the_hugging_face_cache(
    tmp_path: Path, names: list[str], is_listed: bool
) -> None:
    files = {"config.json": _CONFIG, **dict.fromkeys(names, "")}
    if any("-of-2" in name for name in names):
        files["model.safetensors.index.json"] = _SHARDS
    _fake_repo(tmp_path, "org--model", files)
    assert cached_models({"HF_HUB_CACHE": str(tmp_path)}) == ["org/model"] * is_listed


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_whose_blob_is_gone_makes_no_model_of_the_cache(tmp_path: Path, name: str) -> None:
    _fake_repo(tmp_path, "org--model", _WHOLE)
    file = tmp_path / "models--org--model" / "snapshots" / "abc" / name
    file.unlink()
    file.symlink_to(tmp_path / "models--org--model" / "blobs" / "gone")
    assert cached_models({"HF_HUB_CACHE": str(tmp_path)}) == []


def test_a_model_of_audio_may_have_its_vocabulary_in_code(tmp_path: Path) -> None:
    _fake_repo(tmp_path, "org--hears", {"config.json": '{"model_type": "whisper"}', "model.safetensors": ""})
    assert cached_models({"HF_HUB_CACHE": str(tmp_path)}) == ["org/hears"]


def _fake_repo(hub: Path, name: str, files: dict[str, str]) -> None:
    snapshot = hub / f"models--{name}" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (hub / f"models--{name}" / "refs").mkdir()
    (hub / f"models--{name}" / "refs" / "main").write_text("abc")
    for file, text in files.items():
        (snapshot / file).parent.mkdir(exist_ok=True)
        (snapshot / file).write_text(text)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE, port=1234, log_level="Warning", host="::1")

    assert (config.server.port, config.server.log_level, config.server.host) == (1234, "warning", "::1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1", "/mlxd.toml:2: unknown key 'prot' in [server]; did you mean 'port'?"),
        ("\n\n[sevrer]\n", "/mlxd.toml:3: unknown key 'sevrer'; did you mean 'server'?"),
        ("[models.a]\nalias = []", "/mlxd.toml:2: unknown key 'alias' in [models.a]; did you mean 'aliases'?"),
        ("[models.a]\n\nsampling = {temprature = 1}", "did you mean 'temperature'?"),
        (
            '[models."a.b/c"]\nzzz = 1',
            "/mlxd.toml:2: unknown key 'zzz' in [models.a.b/c]; known keys: adapters, aliases",
        ),
        ("[models.a]\nname = 'b'", "unknown key 'name'"),
        ("models.a.zzz = 1", "/mlxd.toml:1: unknown key 'zzz'"),
    ],
)
def test_unknown_keys_are_refused_with_their_line_and_a_suggestion(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\n\nport = 'x'", "/mlxd.toml:3: port: expected int, got str"),
        ("[server]\nport = 99999", "/mlxd.toml:2: port: expected int <= 65535"),
        (
            "[server]\nlog_level = 'loud'",
            "/mlxd.toml:2: log_level: unknown value 'loud'; one of debug, info, warning, error, critical",
        ),
        ("[server]\ndrain = 'soon'", "/mlxd.toml:2: drain: 'soon' is not a duration"),
        ("[server]\nmax_body = '1 furlong'", "/mlxd.toml:2: max_body: '1 furlong' is not a size"),
        ("[server]\ndrain = -1", "/mlxd.toml:2: drain: expected float >= 0"),
        ("[server]\ndrain = 1\ndrain_s = 1", "'drain' is given twice"),
        ("[models.a]\nsampling = { top_p = 2 }", "/mlxd.toml:2: sampling.top_p: expected float <= 1"),
        ("[models.a]\naliases = [1]", "/mlxd.toml:2: aliases: expected str, got int"),
        (
            "[models.a]\nsampling = { repetition_penalty = 1e-38 }",
            "sampling.repetition_penalty: expected float >= 0.01",
        ),
        ("[models.a]\nsampling = 3", "/mlxd.toml:2: sampling: expected object, got int"),
        ("[models.a]\ndtype = 'float8'", "unknown value 'float8'; one of auto, float32, float16, bfloat16"),
        ("[models.a]\nspeculate = 'off'\ndraft = 'b'", "3: draft: with speculate = 'off' nothing is drafted"),
        ("[models.a]\nsparse_prefill = 0.5", "2: sparse_prefill: 'draft' names no model to choose tokens"),
        ("[models.a]\nsparse_prefill = 2", "2: sparse_prefill: "),
        ("[models.a]\nparser = 'hermse'", "2: unknown parser 'hermse'; did you mean 'hermes'?"),
        ("[models.a]\nkind = 'audio'\nkeep_warm = '5m'", ":3: keep_warm is for models that generate text"),
        ("[models.a]\nexperts = 'disk'\nkeep_warm = '5m'", ":3: keep_warm is for models that generate text"),
        ("[models]\na = 1", "/mlxd.toml:2: models.a must be a table"),
        ("models = 1", "models must be a table"),
        ("[server\n", "/mlxd.toml:1: "),
        ("[server]\nport = = 1", "/mlxd.toml:2: "),
    ],
)
def test_bad_values_name_their_line(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "control"),
    [
        ('[models.a]\npath = "\\u0000"', "U+0000"),
        ('[models.a]\n\npath = "/a\\nb"', "U+000A"),
        ('[models.a]\nadapters = { x = "b\\u2028" }', "U+2028"),
        ('[models.a]\naliases = ["b", "c\\u001b[1m"]', "U+001B"),
        ('[server]\nhost = "a\\rb"', "U+000D"),
        ('[server]\nhosts = ["a\\u0085"]', "U+0085"),
        ('[server.tls]\ncertificate = "c\\u0000"\nkey = "k"', "U+0000"),
        ('[models."a\\u0007"]', "U+0007"),
    ],
)
def test_a_control_character_in_a_name_path_or_host_is_refused(tmp_path: Path, text: str, control: str) -> None:
    assert f"has the control character {control}" in failure(tmp_path, text)


def test_a_template_has_several_lines(tmp_path: Path) -> None:
    config = load(tmp_path, '[models.a]\npath = "demo"\nchat_template = """\n{{ messages[0].content }}\n"""')

    assert config.models["a"].chat_template.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[models.'a b']", "must not contain spaces"),
        ("[models.'']", "is empty"),
        ("[models.'a*']", "patterns belong in aliases"),
        ("[models.-x]", "must not begin with '-'"),
        (
            "[models.a]\naliases = ['x']\n[models.b]\naliases = ['x']",
            ":4: alias 'x' of model 'b' already belongs to 'a'",
        ),
        ("[models.a]\naliases = ['b']\n[models.b]", ":2: alias 'b' of model 'a' is the name of another model"),
        ("[models.a]\naliases = ['a']", "already belongs to 'a'"),
        (f"[models.{'x' * 201}]", "longer than 200 bytes"),
    ],
)
def test_bad_and_duplicate_names_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in failure(tmp_path, text)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "example.com"])
def test_listening_beyond_loopback_is_refused_in_a_plain_sentence(tmp_path: Path, host: str) -> None:
    assert ":2: refusing to listen on" in failure(tmp_path, f"[server]\nhost = '{host}'")
    assert "refusing to listen on" in failure(tmp_path, "", host=host)


def test_a_bad_override_is_blamed_on_the_option(tmp_path: Path) -> None:
    assert (
        failure(tmp_path, "", log_level="loud")
        == "--log-level: unknown value 'loud'; one of debug, info, warning, error, critical"
    )
    assert failure(tmp_path, "", port=70000) == "--port: expected int <= 65535"


def test_a_named_file_must_exist_and_the_default_one_need_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path, tmp_path / "absent.toml", has_keys=has_keys)
    load_config(tmp_path / "nowhere", has_keys=has_keys)


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path, has_keys=has_keys)


def test_relative_model_folders_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(tmp_path, "[models.a]\npath = './weights'\n[models.b]\npath = '~/weights'\n[models.c]\npath = 'o/r'")

    assert config.models["a"].path == str(tmp_path / "weights")
    assert config.models["b"].path == "/home/someone/weights"
    assert config.models["c"].path == "o/r"


def test_the_home_folder_comes_from_the_environment() -> None:
    assert default_home({"MLXD_HOME": "/srv/mlxd"}) == Path("/srv/mlxd")
    assert default_home({}) == Path("~/.mlxd").expanduser()


def test_durations_and_sizes_are_read_as_people_write_them() -> None:
    assert [parse_duration(text) for text in ("30", "30s", "250ms", "1.5h", "2 d")] == [30, 30, 0.25, 5400, 172800]
    assert [parse_size(text) for text in ("100", "1KiB", "2 MB", "0.5GiB")] == [100, 1024, 2_000_000, 1 << 29]
    for bad in ("", "s", "-1s", "1 week", "1e9"):
        with pytest.raises(ValueError, match="not a duration"):
            parse_duration(bad)


def test_listening_beyond_loopback_is_allowed_from_the_first_key_on(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    keys.create(Key(name="k", prefix="", salt="", hash=""))
    assert load(tmp_path, "[server]\nhost = '0.0.0.0'").server.host == "0.0.0.0"
    assert load(tmp_path, "", host="::").server.host == "::"

    keys.revoke("k")
    assert "mlxctl keys create" in failure(tmp_path, "", host="::")
    keys.path.write_text("{")
    assert "keys.json" in failure(tmp_path, "", host="::")


def test_pages_that_may_use_mlxd_are_listed_one_by_one(tmp_path: Path) -> None:
    good = "[server]\ncors = ['https://app.example.com', 'http://10.0.0.5:3000']\nmetrics_auth = true"
    server = load(tmp_path, good).server
    assert server.cors == ("https://app.example.com", "http://10.0.0.5:3000")
    assert server.metrics_auth
    assert ":2: cors: '*' must not contain '*'" in failure(tmp_path, "[server]\ncors = ['*']")
    assert ":2: cors: 'app.example.com' is not an origin" in failure(tmp_path, "[server]\ncors = ['app.example.com']")


def test_names_of_this_machine_are_listed_one_by_one(tmp_path: Path) -> None:
    assert load(tmp_path, "[server]\nhosts = ['studio.local', '[fd00::5]']").server.hosts == (
        "studio.local",
        "[fd00::5]",
    )
    assert ":2: hosts: '*' must not contain '*'" in failure(tmp_path, "[server]\nhosts = ['*']")
    assert ":2: hosts: 'a:80' is not a host" in failure(tmp_path, "[server]\nhosts = ['a:80']")


def test_profiles_and_thinking_are_read(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
[models.a]
thinking = { effort = "low", budget = 99 }
profiles.plain = {}
[models.a.profiles.fast]
sampling = { temperature = 0, max_tokens = 5 }
thinking = { enabled = false }
[server]
default = "a:fast"
small = "a"
""",
    )

    model = config.models["a"]
    assert (model.thinking.effort, model.thinking.budget, model.thinking.enabled) == ("low", 99, None)
    assert list(model.profiles) == ["plain", "fast"]
    assert model.profiles["fast"].sampling.max_tokens == 5
    assert model.profiles["fast"].thinking.enabled is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.a]\nprofiles = 3", "/mlxd.toml:2: profiles must be a table: write [models.NAME.profiles.PROFILE]"),
        ('[models.a.profiles."x:y"]', "/mlxd.toml:1: profile name 'x:y' must not contain ':'"),
        ("[models.a.profiles.x]\n\ntemperature = 1", "/mlxd.toml:3: unknown key 'temperature' in"),
        ("[models.a.profiles.x]\nsampling = { top_p = 7 }", "/mlxd.toml:2: sampling.top_p: expected float <= 1.0"),
        ('[models.a]\nthinking = { effort = "vast" }', "/mlxd.toml:2: thinking.effort: unknown value 'vast'"),
        (
            '[models.a.profiles.x]\n[models."a:x"]',
            "/mlxd.toml:1: profile 'x' of model 'a' is the name of another model",
        ),
        ('[server]\ndefault = "b"\n[models.a]', "/mlxd.toml:2: default: The model 'b' does not exist. Models here: a."),
        ('[server]\nsmall = "a:y"\n[models.a.profiles.x]', "/mlxd.toml:2: small: The model 'a:y' does not exist"),
        (
            '[models.a]\nchat_template = "none.jinja"',
            "/mlxd.toml:2: chat_template: cannot read /none.jinja: No such file",
        ),
        ('[models.a]\nchat_template = "mlxd.toml"', "/mlxd.toml:2: chat_template: mlxd.toml holds no Jinja template"),
    ],
)
def test_bad_profiles_defaults_and_templates_name_their_line(tmp_path: Path, text: str, message: str) -> None:
    assert failure(tmp_path, text).startswith(message)


def test_a_chat_template_is_given_as_text_or_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tmp_path / "huge.jinja").write_text("{{ x }}" + "x" * (1 << 20))
    by_file = load(tmp_path, '[models.a]\nchat_template = "own.jinja"')
    inline = load(tmp_path, "[models.a]\nchat_template = '{{ messages }}'")

    assert by_file.models["a"].chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert inline.models["a"].chat_template == "{{ messages }}"
    assert "is longer than" in failure(tmp_path, '[models.a]\nchat_template = "huge.jinja"')


def test_the_words_for_effort_are_those_of_the_apis() -> None:
    assert get_args(Effort) == tuple(EFFORTS)


@pytest.mark.parametrize("url", ["localhost:4318", "ftp://x", "http://", "http://x:99999"])
def test_a_place_for_traces_that_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    said = failure(tmp_path, f'[server]\notlp_endpoint = "{url}"')

    assert said == f"/mlxd.toml:2: otlp_endpoint: {url!r} is no URL such as 'http://127.0.0.1:4318'"


def test_a_place_for_traces_needs_opentelemetry(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text('[server]\notlp_endpoint = "http://127.0.0.1:4318"\n')
    check = "import sys; sys.modules['opentelemetry'] = None; from gateway.main import main; main([])"
    found = subprocess.run(
        [sys.executable, "-c", check], env={"MLXD_HOME": str(tmp_path)}, capture_output=True, text=True, check=False
    )

    assert found.returncode == 78
    assert found.stderr.endswith(
        "mlxd.toml:2: otlp_endpoint: traces need OpenTelemetry, which is not installed: pip install 'mlxd[otel]'\n"
    )


@pytest.mark.skipif(sys.platform == "darwin", reason="it can be done there")
def test_a_machine_that_cannot_be_kept_awake_refuses_to_say_so(tmp_path: Path) -> None:
    assert load(tmp_path, "[server]\nport = 1").server.prevent_sleep == "busy"

    said = failure(tmp_path, '[server]\nprevent_sleep = "always"')

    assert said == "/mlxd.toml:2: prevent_sleep: 'always' is for macOS; set that in this system"


@pytest.mark.parametrize(("level", "status"), [*scaled([("DEBUG", 78)], []), ("Warning", 78), ("loud", 2)])
def test_the_daemon_takes_a_level_in_any_case_and_no_other(tmp_path: Path, level: str, status: int) -> None:
    (tmp_path / "mlxd.toml").write_text("broken")
    command = [sys.executable, "-P", "-m", "gateway.main", "--log-level", level]
    found = subprocess.run(
        command, env={"MLXD_HOME": str(tmp_path)}, cwd=Path(__file__).parents[3], capture_output=True, check=False
    )

    # A level that is taken gets as far as the configuration.
    assert found.returncode == status
