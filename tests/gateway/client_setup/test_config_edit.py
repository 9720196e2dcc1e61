import json
import tomllib

import pytest
from ruamel.yaml import YAML

from gateway.client_setup.clients import CLIENTS, Endpoint, setup
from gateway.client_setup.config_edit import ConfigEdit, FileFormat, NotEditable

TO = Endpoint("http://127.0.0.1:8484", "coder", 65536)


def test_toml_keeps_comments_and_tables_and_puts_plain_keys_before_them() -> None:
    before = (
        '# mine\nmodel = "gpt-5"  # for work\n\n[mcp_servers.docs]\ncommand = "docs"\n\n'
        '[model_providers.other]\nname = "o"\n'
    )
    after = setup("codex", TO).edits[0].merged(before)

    read = tomllib.loads(after)
    assert read["model"] == "coder"
    assert read["model_provider"] == "mlxd"
    assert read["model_providers"]["mlxd"]["base_url"] == "http://127.0.0.1:8484/v1"
    assert read["model_providers"]["other"] == {"name": "o"}
    assert read["mcp_servers"] == {"docs": {"command": "docs"}}
    assert "# mine" in after
    assert "# for work" in after


def test_yaml_keeps_comments_and_replaces_only_the_item_of_its_name() -> None:
    before = (
        "name: my assistant # hers\nversion: 0.0.1\nschema: v1\n"
        "models:\n  # the large one\n  - name: cloud\n    provider: anthropic\n"
        "  - name: mlxd\n    model: old\n    defaultCompletionOptions:\n      temperature: 0.2 # low\n"
        "rules: ['be brief']\n"
    )
    after = setup("continue", TO).edits[0].merged(before)

    read = YAML(typ="safe").load(after)
    assert read["name"] == "my assistant"
    assert [model["name"] for model in read["models"]] == ["cloud", "mlxd"]
    assert read["models"][1]["model"] == "coder"
    assert read["models"][1]["defaultCompletionOptions"] == {"temperature": 0.2}
    kept = [line for line in before.splitlines() if "model: old" not in line]
    assert [line for line in after.splitlines() if line in kept] == kept


def test_json_keeps_other_content_its_order_and_its_indentation() -> None:
    before = '{\n\t"theme": "dark",\n\t"env": {\n\t\t"FOO": "1"\n\t},\n\t"permissions": {"allow": ["Bash"]}\n}\n'
    after = setup("claude", TO).edits[0].merged(before)

    read = json.loads(after)
    assert list(read) == ["theme", "env", "permissions"]
    assert read["env"]["FOO"] == "1"
    assert read["env"]["ANTHROPIC_MODEL"] == "coder"
    assert read["permissions"] == {"allow": ["Bash"]}
    assert '\n\t"theme"' in after


def test_lines_of_variables_are_replaced_where_they_stand() -> None:
    before = "# keys\nexport OPENAI_MODEL = old\nOTHER=1\n"
    after = setup("qwen", TO).edits[0].merged(before)

    assert after.splitlines()[:3] == ["# keys", "OPENAI_MODEL=coder", "OTHER=1"]
    assert "OPENAI_BASE_URL=http://127.0.0.1:8484/v1" in after.splitlines()


def test_only_line_feeds_end_the_lines_of_variables() -> None:
    values = "\f", "\v", "\x1c", "\x85", "\u2028", "\u2029", "\r"
    before = "".join(f"V{number}=x{value}OPENAI_MODEL=y\n" for number, value in enumerate(values))
    after = setup("qwen", TO).edits[0].merged(before)

    assert after.startswith(before)
    with pytest.raises(NotEditable, match="more than one line"):
        ConfigEdit("x", FileFormat.ENV, {"A": "b\nEVIL=1"}).merged("")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_file_is_its_owners_alone_where_the_key_is_in_it(client: str) -> None:
    with_key = Endpoint("http://127.0.0.1:8484", "coder", 65536, "sk-mlxd-secret")
    for edit in setup(client, with_key).edits:
        assert edit.has_key is ("sk-mlxd-secret" in edit.fragment())
    assert not any(edit.has_key for edit in setup(client, TO).edits)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_second_merge_changes_nothing(client: str) -> None:
    for edit in setup(client, TO).edits:
        once = edit.fragment()
        assert once
        assert edit.merged(once) == once


@pytest.mark.parametrize("client", CLIENTS)
def test_another_model_takes_the_place_of_the_first_or_joins_it(client: str) -> None:
    other = Endpoint("http://127.0.0.1:9000", "small", 8192, "sk-1")
    for first, second in zip(setup(client, TO).edits, setup(client, other).edits, strict=True):
        after = second.merged(first.fragment())
        assert "8484" not in after
        assert second.merged(after) == after


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (FileFormat.JSON, '{"a": 1, // why\n}'),
        (FileFormat.TOML, "a = "),
        (FileFormat.YAML, "a: [1"),
        (FileFormat.JSON, "[1]"),
    ]
    + [(FileFormat.JSON, text) for text in ("5", "null", '"x"', "true")]
    + [(FileFormat.YAML, text) for text in ("5", "words", "[1]", "a: 2024-13-45")],
)
def test_a_file_of_another_form_is_not_touched(form: FileFormat, text: str) -> None:
    with pytest.raises(NotEditable):
        ConfigEdit("x", form, {"b": 1}).merged(text)


@pytest.mark.parametrize(
    ("content", "named"), [({"env": {"A": "1"}}, "'env' is no object"), ({"l": [{"id": 1}]}, "'l' is no")]
)
def test_what_stands_in_the_place_of_an_object_is_not_replaced(content: dict[str, object], named: str) -> None:
    with pytest.raises(NotEditable, match=named):
        ConfigEdit("x", FileFormat.JSON, content, item_key="id").merged('{"env": "mine", "l": "mine"}')


def test_json_that_has_it_already_is_left_as_it_is_formatted() -> None:
    text = '{"b":1,   "c":2}'

    assert ConfigEdit("x", FileFormat.JSON, {"b": 1}).merged(text) == text


def test_codex_reads_its_key_from_a_variable_and_has_none_in_its_file() -> None:
    with_key = setup("codex", Endpoint("http://127.0.0.1:8484", "coder", 65536, "sk-mlxd-secret"))

    text = with_key.edits[0].fragment()
    assert "sk-mlxd-secret" not in text + with_key.command
    assert tomllib.loads(text)["model_providers"]["mlxd"]["env_key"] == "MLXD_KEY"
    assert "env_key" not in setup("codex", TO).edits[0].fragment()


def test_a_client_is_told_whether_the_model_takes_images() -> None:
    seeing = Endpoint("http://127.0.0.1:8484", "coder", 65536, takes_images=True)
    for client in ("opencode", "pi", "continue"):
        blind, sighted = (setup(client, to).edits[0].fragment() for to in (TO, seeing))
        assert "image" not in blind
        assert "image" in sighted
