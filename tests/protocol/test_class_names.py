"""Class names: a public one belongs to one module of gateway, worker and protocol.

`class_names.txt` lists those that two modules had when the rule was made. A name leaves it with its second class.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("gateway", "worker", "protocol")
KNOWN: Final = Path(__file__).with_name("class_names.txt").read_text().split()


def duplicates(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Modules of each public class name that several have."""
    modules: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        tree = ast.parse(path.read_bytes(), str(path))
        for name in {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}:
            if not name.startswith("_"):
                modules[name].append(path)
    return {name: places for name, places in modules.items() if len(places) > 1}


def test_a_public_class_name_belongs_to_one_module() -> None:
    found = duplicates(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

    assert {name: places for name, places in found.items() if name not in KNOWN} == {}, "choose another name"
    assert [name for name in KNOWN if name not in found] == [], "take it out of class_names.txt"


def test_the_list_of_known_duplicates_is_sorted() -> None:
    assert sorted(set(KNOWN)) == KNOWN


def test_a_second_class_of_a_name_is_found_unless_it_is_private(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Call: ...\nclass _Own: ...\nclass Alone: ...\n")
    (tmp_path / "two.py").write_text("class Outer:\n    class Call: ...\nclass _Own: ...\n")

    assert duplicates(tmp_path.glob("*.py")) == {"Call": [tmp_path / "one.py", tmp_path / "two.py"]}
