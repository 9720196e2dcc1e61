"""Fixtures shared by all tests."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random model by architecture, built once per run."""
    from tests.support.models import build

    root = tmp_path_factory.mktemp("models")

    def folder(architecture: str) -> Path:
        path = root / architecture
        return path if path.exists() else build(architecture, path)

    return folder
