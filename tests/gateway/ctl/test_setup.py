"""`mlxctl setup`: vision and audio."""

import importlib.util
import re
from pathlib import Path

import pytest

from gateway.command_failed import CommandFailed
from gateway.ctl.setup import command_of, requirements
from tests.support.ctl import ctl


def test_mlx_vlm_is_pinned_by_its_hash_and_installed_alone(tmp_path: Path) -> None:
    shown = ctl(tmp_path, "setup", "vision", "--print").stdout.split()

    assert {"--no-deps", "--require-hashes", "-r", str(requirements())} <= set(shown)
    assert re.search(r"^mlx-vlm==[0-9.]+ --hash=sha256:[0-9a-f]{64}$", requirements().read_text(), re.MULTILINE)


def test_mlx_audio_and_what_it_needs_are_pinned_by_their_hashes(tmp_path: Path) -> None:
    shown = ctl(tmp_path, "setup", "audio", "--print").stdout.split()

    assert {"--no-deps", "--require-hashes", "-r", str(requirements("audio"))} <= set(shown)
    pinned = re.findall(
        r"^([a-z-]+)==[0-9.]+ \\\n +--hash=sha256:[0-9a-f]{64}", requirements("audio").read_text(), re.M
    )
    assert pinned == ["av", "mlx-audio", "scipy"]


def test_it_goes_into_the_environment_of_mlxctl_by_uv_or_by_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command_of("/env/bin/python", "/bin/uv", "")[:6] == [
        *("/bin/uv", "pip", "install", "--quiet", "--python", "/env/bin/python"),
    ]
    assert command_of("/env/bin/python", None, "/wheels")[:4] == ["/env/bin/python", "-m", "pip", "install"]
    assert {"--no-index", "--find-links", "/wheels"} <= set(command_of("/env/bin/python", None, "/wheels"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CommandFailed, match="neither uv nor pip"):
        command_of("/env/bin/python", None, "")
