"""Figures of modules become tables of the page."""

from pathlib import Path

from tests.real import figures, page
from tests.real.figures import Figures


def test_what_modules_measured_stands_in_their_sections(tmp_path: Path) -> None:
    for module in ("test_speech", "test_numbers"):
        noted = Figures(module)
        noted.note(f"subject of {module}", "a | b")
        noted.write(tmp_path)

    text = page.render(figures.read(tmp_path), {"test_numbers": (3, 4)}, {"commit": "abc"})

    assert "| commit | abc |" in text
    assert "| Numbers | 3 of 4 |" in text
    assert text.index("| subject of test_numbers | a \\| b |") < text.index("| subject of test_speech")


def test_a_module_that_measured_nothing_writes_nothing(tmp_path: Path) -> None:
    Figures("test_dialects").write(tmp_path)

    assert figures.read(tmp_path) == {}
    assert "## Dialects" not in page.render({}, {}, {})
