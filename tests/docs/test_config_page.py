"""The page about the configuration: its tables are those of the settings, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from gateway.config.export import descriptions
from gateway.config.settings import Config
from tests.docs import config_page
from tests.docs.config_page import PAGE, is_table, keys, page, tables_in


def test_the_tables_of_the_page_are_those_of_the_settings() -> None:
    assert PAGE.read_text() == page(), "make docs writes it"


def test_each_table_of_the_file_has_a_place_on_the_page() -> None:
    for name, _ in tables_in(Config):
        if "." not in name.removesuffix(".NAME"):
            assert f"<!--keys:{name}-->" in PAGE.read_text()


def test_each_key_has_a_description_of_whole_sentences() -> None:
    texts = descriptions()
    for name, struct in tables_in(Config):
        for field in keys(struct):
            if not is_table(field.type):
                assert texts[struct.__name__][field.name].endswith("."), f"{name}.{field.name}"


def test_a_key_is_marked_if_a_reload_restarts_something_for_it() -> None:
    rows = dict(re.findall(r"^\| \[?`([\w.]+)`(?:\]\(\S+\))?([†↻]?) \|", PAGE.read_text(), re.MULTILINE))

    marks = ("port", "†"), ("tls.key", "†"), ("cors", ""), ("context", "↻"), ("group", "↻"), ("aliases", "")
    assert {key: rows[key] for key, _ in marks} == dict(marks)


def test_a_place_for_a_table_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "configuration.md"
    stale.write_text("<!--keys:telemetry-->\n<!--end-->\n")
    monkeypatch.setattr(config_page, "PAGE", stale)

    with pytest.raises(LookupError, match="telemetry"):
        page()


def test_each_link_of_the_page_leads_to_a_heading() -> None:
    for name, anchor in re.findall(r"\]\(([\w-]*\.md)?(?:#([\w-]+))?\)", PAGE.read_text()):
        text = (PAGE.parent / (name or PAGE.name)).read_text()
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, f"{name}#{anchor}"
