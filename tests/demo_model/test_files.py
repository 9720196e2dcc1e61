"""The data files of the corpus."""

import pytest

from deploy.demo_model.corpus.files import FOLDER, table, word_list

LISTS = sorted(path.stem for path in (FOLDER / "word_lists").iterdir())
SOURCE = "".join(path.read_text() for path in FOLDER.glob("*.py"))


@pytest.mark.parametrize("name", LISTS)
def test_a_word_list_has_one_item_a_line_and_is_read(name: str) -> None:
    items = word_list(name)
    assert items
    assert all(item and item == item.strip() for item in items)
    assert f'word_list("{name}")' in SOURCE


def test_every_table_and_every_key_of_phrasings_is_read() -> None:
    for path in (FOLDER / "tables").iterdir():
        for key in table(path.stem):
            assert f'"{key}"' in SOURCE, f"{path.name}: {key}"


def test_files_of_other_kinds_are_not_among_the_data() -> None:
    assert {path.suffix for path in (FOLDER / "word_lists").iterdir()} == {".txt"}
    assert {path.suffix for path in (FOLDER / "tables").iterdir()} == {".toml"}
