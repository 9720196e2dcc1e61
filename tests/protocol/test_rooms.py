"""Rooms: folders that each hold one noun, and import only the rooms below them (the contracts of pyproject.toml)."""

import ast
import subprocess
import sys
import tomllib
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import grimp
import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("gateway", "worker", "protocol")
FILES_MAX: Final = 25


def test_a_room_imports_only_the_rooms_below_it() -> None:
    # A process of its own: the linter's configuration of logging disables the loggers that there are.
    linter = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_module_of_the_gateway_and_of_the_worker_has_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer for contract in contracts if contract["type"] == "layers" for layer in contract["layers"]]
    rooms = {room.strip() for layer in layers for room in layer.split("|")}
    files = [file for package in ("gateway", "worker") for file in (ROOT / package).rglob("*.py")]
    paths = [file.relative_to(ROOT).with_suffix("").parts for file in files if file.name != "__init__.py"]
    above = {path: {".".join(path[:count]) for count in range(1, len(path) + 1)} for path in paths}

    assert [".".join(path) for path in paths if not above[path] & rooms] == [], "write a layer in pyproject.toml"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    graph = grimp.build_graph(package, cache_dir=None)
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


def test_a_folder_has_few_files_and_says_what_it_is() -> None:
    count: defaultdict[Path, int] = defaultdict(int)
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if file.name == "__init__.py":
                assert ast.get_docstring(ast.parse(file.read_text())), f"{file} has no docstring"
            else:
                count[file.parent] += 1
    assert {str(path.relative_to(ROOT)): files for path, files in count.items() if files > FILES_MAX} == {}
