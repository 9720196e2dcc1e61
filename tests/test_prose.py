"""Prose of the code: docstrings open with the noun that the thing is or the verb that it does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("gateway", "worker", "protocol", "deploy", "tests", "benchmarks")
# A reader who searches for a heartbeat or a failover finds no "What …" or "Who …".
RELATIVE = re.compile(r"(?:What|Who|Which|Where|Whose|Whoever|How|Why)\b")


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _openings(path: Path) -> dict[str, str]:
    """First line of each docstring, by the place of what it documents."""
    tree = ast.parse(path.read_bytes(), str(path))
    documents = {
        f"{path}:{getattr(node, 'lineno', 1)}": ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
    }
    return {place: document.partition("\n")[0] for place, document in documents.items() if document}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_opens_with_a_relative_clause(folder: str) -> None:
    openings = {place: line for path in (ROOT / folder).rglob("*.py") for place, line in _openings(path).items()}

    assert openings
    assert {place: line for place, line in openings.items() if RELATIVE.match(line)} == {}


def test_a_docstring_that_opens_with_a_relative_clause_is_recognized(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Calls."""\nclass Call:\n    def ask(self):\n        """What workers were asked."""\n')

    assert [bool(RELATIVE.match(line)) for line in _openings(module).values()] == [False, True]
