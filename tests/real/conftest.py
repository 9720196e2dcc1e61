"""Fixtures of tests on real weights. Without the folders nothing here is collected but the tests of the fetch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.figures import Figures
from tests.real.prepare import is_ready
from tests.real.serving import Served, serve

# Tests that need no weights.
_WITHOUT_WEIGHTS = {"test_packages.py", "test_figures.py"}
_READY = is_ready()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_test = collection_path.parent == Path(__file__).parent and collection_path.name.startswith("test_")
    return True if is_test and not _READY and collection_path.name not in _WITHOUT_WEIGHTS else None


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """What a module measured, for docs/real-weights.md."""
    noted = Figures(request.node.path.stem)
    yield noted
    noted.write()


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A daemon on the models that the module names in `MODELS`, each with the lines of its table."""
    with serve(request.module.MODELS) as daemon:
        yield daemon
