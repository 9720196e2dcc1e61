"""Wheels of this checkout under another version, for what installs them. No build tool, no network."""

import base64
import hashlib
import re
import site
import zipfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "worker", "protocol")
SCRIPTS = "[console_scripts]\nmlxd = gateway:main\nmlxctl = gateway.ctl:main\n"


def build_wheel(folder: Path, version: str, more: Mapping[str, str] | None = None) -> Path:
    """`more`: text to append to files, by their path. The dependencies are those of the tests, by a .pth file."""
    files = {f"{path.relative_to(ROOT)}": path.read_bytes() for package in PACKAGES for path in _files(ROOT / package)}
    init = files["protocol/__init__.py"].decode()
    files["protocol/__init__.py"] = re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', init).encode()
    for name, text in (more or {}).items():
        files[name] += text.encode()
    info = f"mlxd-{version}.dist-info"
    files["mlxd_dependencies.pth"] = "\n".join(site.getsitepackages()).encode()
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: mlxd\nVersion: {version}\nProvides-Extra: cpu\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = SCRIPTS.encode()
    files[f"{info}/RECORD"] = "".join(_record(name, body) for name, body in files.items()).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"mlxd-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return wheel


def _files(package: Path) -> list[Path]:
    return [path for path in sorted(package.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def _record(name: str, body: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(body)}\n"
