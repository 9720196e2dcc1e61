"""Prose of the code: module docstrings open with the noun that the module is or the verb that it does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("gateway", "worker", "protocol", "deploy", "tests", "benchmarks")
# A reader who searches for a heartbeat or a failover finds no "What …" or "Who …".
RELATIVE = re.compile(r"(?:What|Who|Which|Where|Whose)\b")


def _opening(path: Path) -> str:
    """First line of a module's docstring; empty where it has none."""
    document = ast.get_docstring(ast.parse(path.read_bytes(), str(path))) or ""
    return document.partition("\n")[0]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_docstring_opens_with_a_relative_clause(folder: str) -> None:
    modules = sorted((ROOT / folder).rglob("*.py"))
    openings = {str(path.relative_to(ROOT)): _opening(path) for path in modules}

    assert openings
    assert {path: line for path, line in openings.items() if RELATIVE.match(line)} == {}


def test_a_docstring_that_opens_with_a_relative_clause_is_recognized(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""What workers were asked."""\n')

    assert RELATIVE.match(_opening(module))
