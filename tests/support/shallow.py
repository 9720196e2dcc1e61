"""Models of two layers, for tests that run an engine in their own process: a step costs the number of layers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import build, shallow


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """As the one for all tests, in full runs with as many layers."""
    root = tmp_path_factory.mktemp("shallow")

    def folder(architecture: str) -> Path:
        path = root / architecture
        return path if path.exists() else build(architecture, path, **shallow(architecture))

    return folder
