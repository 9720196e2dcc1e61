"""Class names: each belongs to one module of gateway, worker and protocol."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("gateway", "worker", "protocol")


def duplicates(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Modules of each class name that several have."""
    modules: defaultdict[str, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        tree = ast.parse(path.read_bytes(), str(path))
        for name in {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}:
            modules[name].append(path)
    return {name: places for name, places in modules.items() if len(places) > 1}


def test_a_class_name_belongs_to_one_module() -> None:
    found = duplicates(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

    assert found == {}, "choose another name"


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("class Call: ...\nclass _Own: ...\nclass Alone: ...\n")
    two.write_text("class Outer:\n    class Call: ...\nclass _Own: ...\n")

    assert duplicates(tmp_path.glob("*.py")) == {"Call": [one, two], "_Own": [one, two]}
