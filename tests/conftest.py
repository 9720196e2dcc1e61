"""Fixtures shared by all tests."""

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import scale
from tests.support.daemon import DaemonProcess

# How long one example takes says more about the machine than about the code. `make test` plays the same examples each
# time, so that a change fails for what it changed; `make soak` plays new ones.
settings.register_profile("mlxd", deadline=None, max_examples=scale.scaled(100, 50), derandomize=not scale.FULL)
settings.load_profile("mlxd")
# Under nohup or in the background these are ignored, and every process that a test starts would ignore them too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Where an environment forbids Python to keep what it compiles, every process that a test starts compiles mlxd anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# All test modules and what they import are a few million objects that live to the end: the garbage collector would go
# through them again and again, which takes two fifths of a collection's time.
gc.disable()


# Files that take long, longest first: begun last, one of them would keep one process busy while the others idle.
HEAVY = Path(__file__).with_name("heavy.txt").read_text().split()


def pytest_report_header() -> str:
    size = "in full" if scale.FULL else "in small (`make soak` runs the rest)"
    return f"mlxd: {size}, deadlines times {scale.patience()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Heavy files first; the order within a file, and of the others, stays."""
    rank = {config.rootpath / name: at for at, name in enumerate(HEAVY)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_collection_finish() -> None:
    """From here on the garbage collector runs, but leaves out what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def patience() -> None:
    """Deadlines of a module do not get shorter within it."""
    scale.PATIENCE.relax()


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Log levels as they were: a worker or daemon run in this process sets those of its loggers."""
    root = logging.getLogger()
    loggers = [root, *(each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))]
    before = [each.level for each in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        if logger.level != level:
            logger.setLevel(level)


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


@pytest.fixture(scope="session")
def demo_daemon() -> Iterator[DaemonProcess]:
    """A daemon on the embedded model, for all tests that only ask it something.

    Answers are greedy.
    """
    with tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as folder:
        home = Path(folder)
        (home / "mlxd.toml").write_text(
            '[server]\nport = 0\n[models.demo]\npath = "demo"\naliases = ["claude-*"]\n'
            'sampling = { temperature = 0.0 }\n[models.small]\npath = "demo"\ncontext = 256\n'
        )
        with DaemonProcess(home, module="gateway.main") as daemon:
            yield daemon


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder short enough for socket paths, which pytest's own are not on macOS."""
    with tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as folder:
        yield Path(folder)
