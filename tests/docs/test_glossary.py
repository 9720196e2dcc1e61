"""The glossary has the words of the other pages, each once, in order."""

import re

from tests.support.daemon import ROOT

PAGE = ROOT / "docs" / "glossary.md"


def test_each_word_of_the_glossary_is_one_that_other_pages_use() -> None:
    words = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)[1:]
    others = " ".join(file.read_text() for file in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"] if file != PAGE)
    unused = [word for each in words for word in each.split(", ") if word.lower() not in others.lower()]

    assert unused == []
    assert words == sorted(set(words), key=str.lower)
