"""Environment of verbs that talk to a hub on a socket of this machine; a test file has the hub."""

from pathlib import Path

import pytest

from tests.support.hub import Hub


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub cache of every `mlxctl` of this test."""
    cache = tmp_path / "cache"
    for name, value in hub.environ(cache).items():
        monkeypatch.setenv(name, value)
    return cache
