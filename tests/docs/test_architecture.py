"""The architecture page names files that exist, and packages in the layers of import-linter's contracts."""

import re
import tomllib

import pytest

from tests.support.daemon import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


@pytest.mark.parametrize("root", ["gateway", "worker"])
def test_the_rows_of_packages_are_the_layers_of_the_contract(root: str) -> None:
    table = re.search(rf"^### {root}\n\n\| packages .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert table is not None
    cells = [row.split(" | ")[0] for row in table[1].splitlines()]
    rows = [{f"{root}.{name.replace('/', '.')}" for name in re.findall(r"`([^`]+)`", cell)} for cell in cells]

    [layers] = [contract["layers"] for contract in CONTRACTS if contract["id"] == root]
    assert rows == [set(layer.split(" | ")) for layer in layers]


def test_every_file_and_folder_on_the_page_exists() -> None:
    paths = set(re.findall(r"`((?:gateway|worker|protocol|tests)/[\w/]+(?:\.py)?)`", PAGE))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []

    names = set(re.findall(r"`(\w+\.py)`", PAGE))
    known = {file.name for package in ("gateway", "worker") for file in (ROOT / package).rglob("*.py")}
    assert names - known == set()
