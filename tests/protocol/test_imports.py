"""Rules of imports between packages: by what the files say, and by what a process that imports them has loaded."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MLX = {"mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "numpy"}
HTTP = {"starlette", "uvicorn", "fastapi", "httpx2", "typer", "rich", "prometheus_client"}
FORBIDDEN = {
    "protocol": {"gateway", "worker"} | MLX | HTTP,
    "gateway": {"worker"} | MLX,
    "worker": {"gateway"} | HTTP,
}


@cache
def files(package: str) -> dict[Path, ast.Module]:
    """The modules of a package and what they say."""
    return {path: ast.parse(path.read_bytes(), str(path)) for path in sorted((ROOT / package).rglob("*.py"))}


def imports(file: Path, tree: ast.Module) -> set[str]:
    """Top-level names of everything a file imports, anywhere in it, also by name through importlib."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found |= {alias.name.partition(".")[0] for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"), args=[first, *_]):
                assert isinstance(first, ast.Constant), f"{file}:{node.lineno} imports what only runtime knows"
                found.add(str(first.value).partition(".")[0])
            case _:
                pass
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_file_imports_what_its_package_must_not(package: str) -> None:
    assert files(package), "the package has files"
    broken = {
        str(file.relative_to(ROOT)): sorted(imports(file, tree) & FORBIDDEN[package])
        for file, tree in files(package).items()
    }
    assert {file: names for file, names in broken.items() if names} == {}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_process_that_imports_a_package_has_loaded_nothing_it_must_not(package: str) -> None:
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files(package)
        if file.name != "__main__.py"
    ]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    # transformers and huggingface_hub bring httpx2 and rich along: that is their affair.
    wanted = FORBIDDEN[package] - (HTTP - {"starlette"} if package == "worker" else set())
    assert sorted(wanted & set(ran.stdout.split())) == []


def test_the_wire_is_importable_before_mlx() -> None:
    """A worker introduces itself before it pays for MLX."""
    code = "import sys, worker.main, worker.link, worker.engine.gauges; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not MLX & set(ran.stdout.split())


def test_a_daemon_starts_without_the_library_of_the_hub() -> None:
    """A third of its start; the processes that ask the hub and download import it."""
    code = "import sys, gateway.daemon; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    # httpx2 is the only HTTP client of the product.
    assert not {"huggingface_hub", "httpx", "httpcore"} & set(ran.stdout.split())


def test_only_the_sockets_module_sets_socket_options_of_the_protocol() -> None:
    setters = {
        str(file.relative_to(ROOT))
        for package in FORBIDDEN
        for file, tree in files(package).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"setsockopt", "set_hwm"}
    }
    # gateway/http/listen_and_tls.py opens the TCP sockets, which are no part of the protocol.
    assert setters == {"protocol/sockets.py", "gateway/http/listen_and_tls.py"}
