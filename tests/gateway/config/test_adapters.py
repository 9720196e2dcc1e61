"""Adapters in the configuration, their names, and the keys that they open to."""

import tomllib
from pathlib import Path

import pytest

from gateway.access.caller import OWNER, Caller
from gateway.config.export import to_json, to_toml
from gateway.config.load import load_config
from gateway.config.names import Names, Pattern
from gateway.config.settings import Config, ConfigError
from gateway.errors import ModelNotFound
from gateway.reload import changes

FILE = """
[models.coder]
aliases = ["gpt-4o", "claude-*"]

[models.coder.profiles.calm.sampling]
temperature = 0.1

[models.coder.adapters]
sql = "./adapters/sql"
docs = "me/docs-lora"
"""


def load(folder: Path, text: str) -> Config:
    (folder / "mlxd.toml").write_text(text)
    return load_config(folder, has_keys=lambda _: True)


def test_an_adapter_is_asked_for_by_its_name_or_behind_any_name_of_its_model(tmp_path: Path) -> None:
    config = load(tmp_path, FILE)
    model = config.models["coder"]
    assert model.adapters == {"sql": str(tmp_path / "adapters" / "sql"), "docs": "me/docs-lora"}
    names = Names(config.models)
    for name in ("sql", "coder:sql", "gpt-4o:sql", "claude-opus-4:sql", "sql:latest", "coder:sql:latest"):
        found = names.locate(name)
        assert (found.model.name, found.model.adapter, found.profile) == ("coder", "sql", ""), name
        assert found.model.root == model.adapters["sql"]
    for name in ("sql:calm", "coder:sql:calm"):
        found = names.locate(name)
        assert (found.model.adapter, found.profile) == ("sql", "calm")
    for name in ("coder", "gpt-4o", "claude-opus-4", "coder:calm"):
        assert names.locate(name).model.adapter == ""
    for name in ("coder:other", "sql:other", "gpt-4o:sql:other"):
        with pytest.raises(ModelNotFound):
            names.locate(name)


def test_the_configuration_shows_its_adapters_as_it_was_written(tmp_path: Path) -> None:
    config = load(tmp_path, FILE)
    shown = tomllib.loads(to_toml(config))["models"]["coder"]
    assert shown["adapters"] == config.models["coder"].adapters
    assert "adapter" not in shown
    assert load(tmp_path, to_toml(config)).models == config.models
    models = to_json(config)["models"]
    assert isinstance(models, dict)
    assert models["coder"]["adapters"] == config.models["coder"].adapters  # pyright: ignore[reportUnknownVariableType]
    other = load(tmp_path, FILE.replace("sql =", "other ="))
    assert list(changes(config, other)) == ["models.coder.adapters"]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('[models.a]\n[models.a.adapters]\n"x:y" = "p"', 3, "must not contain ':'"),
        ('[models.a]\n[models.a.adapters]\n"x*" = "p"', 3, "must not contain '*'"),
        ("[models.a]\n[models.a.adapters]\nx = 3", 3, "needs the path"),
        ('[models.a]\n[models.a.adapters]\nx = ""', 3, "needs the path"),
        ("[models.a]\nadapters = 3", 2, "must be a table"),
        ('[models.a]\nkind = "embed"\n[models.a.adapters]\nx = "p"', 3, "generate text"),
        ('[models.a]\n[models.b]\n[models.a.adapters]\nb = "p"', 4, "the model 'b'"),
        ('[models.a]\naliases = ["x"]\n[models.a.adapters]\nx = "p"', 4, "the model 'a'"),
        ('[models.a.adapters]\nx = "p"\n[models.b.adapters]\nx = "p"', 4, "an adapter of 'a'"),
        ('[models.a.profiles.x]\n[models.a.adapters]\nx = "p"', 3, "a profile of 'a'"),
        ('[models.a]\nadapter = "x"', 2, "unknown key 'adapter'"),
    ],
)
def test_a_name_that_is_taken_or_a_path_that_is_none_is_refused_with_its_line(
    text: str, line: int, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    assert reason in str(refused.value)
    assert refused.value.line == line


def test_more_adapters_than_a_worker_takes_are_refused(tmp_path: Path) -> None:
    lines = "\n".join(f'a{at} = "p"' for at in range(65))
    with pytest.raises(ConfigError, match="at most 64"):
        load(tmp_path, f"[models.a.adapters]\n{lines}")


def test_a_key_has_the_adapters_that_its_patterns_match_and_no_others(tmp_path: Path) -> None:
    names = Names(load(tmp_path, FILE).models)

    def usable(*patterns: str) -> set[str]:
        caller = Caller("k", tuple(map(Pattern, patterns)))
        every = ("coder", "coder:sql", "coder:docs")
        return {name for name in every if caller.may_use(names.locate(name).model)}

    assert usable("coder") == {"coder"}
    assert usable("gpt-4o") == {"coder"}
    assert usable("sql") == usable("coder:sql") == usable("gpt-4o:sql") == {"coder:sql"}
    assert usable("coder:*") == {"coder:sql", "coder:docs"}
    assert usable("coder", "docs") == {"coder", "coder:docs"}
    assert usable("coder*") == usable("*") == {"coder", "coder:sql", "coder:docs"}
    assert OWNER.may_use(names.locate("sql").model)
    # What a key may not use does not exist for it.
    with pytest.raises(ModelNotFound) as refused:
        names.locate("sql", Caller("k", (Pattern("coder"),)).may_use)
    assert "coder:docs" not in refused.value.message
