"""Libraries and sizes of the page: what is committed is what the manifest says, and small enough for a first paint."""

import gzip
import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "gateway" / "web" / "page"
VENDOR = PAGE / "vendor"
MANIFEST = json.loads((VENDOR / "manifest.json").read_text())
FIRST_PAINT_BYTES_MAX = 100_000
FOLDER_BYTES_MAX = 850_000
_IMPORT = re.compile(r"""^(?:import|export)\s(?:[^"']*?\sfrom\s)?["'](\.[^"']+)["'];""", re.MULTILINE)


def modules_of_first_paint() -> set[Path]:
    """`main.js` and what it imports before anything is drawn; `import(…)` is for later."""
    waiting, seen = [PAGE / "main.js"], set[Path]()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += [(module.parent / name).resolve() for name in _IMPORT.findall(module.read_text())]
    return seen


def test_every_vendored_file_has_the_digest_that_the_manifest_names() -> None:
    names = {path.name for path in VENDOR.iterdir() if path.is_file() and path.suffix in (".js", ".css")}
    digests = {name: hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() for name in names}

    assert digests == {name: entry["sha256"] for name, entry in MANIFEST.items()}
    assert {name: (VENDOR / name).stat().st_size for name in names} == {
        name: entry["bytes"] for name, entry in MANIFEST.items()
    }


def test_every_vendored_package_has_its_version_pinned_and_its_licence_beside_it() -> None:
    package = json.loads((ROOT / "deploy" / "web" / "package.json").read_text())
    locked = json.loads((ROOT / "deploy" / "web" / "package-lock.json").read_text())["packages"]
    names = {text for entry in MANIFEST.values() for text in entry["packages"]}

    assert names
    for text in names:
        name, version, licence = re.fullmatch(r"(\S+) (\S+) \((.+)\)", text).groups()  # type: ignore[union-attr]
        assert locked[f"node_modules/{name}"]["version"] == version
        assert licence in ("MIT", "ISC", "BSD-3-Clause", "Apache-2.0")
        assert (VENDOR / "licences" / f"{name.replace('/', '-').replace('@', '')}.txt").stat().st_size > 500
    pinned = package["dependencies"] | package["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in pinned.values())


def test_the_lock_file_names_no_registry() -> None:
    locked = json.loads((ROOT / "deploy" / "web" / "package-lock.json").read_text())["packages"]

    assert [name for name, entry in locked.items() if "resolved" in entry] == []
    assert all(entry["integrity"].startswith("sha512-") for name, entry in locked.items() if name)


def test_the_first_paint_and_the_folder_are_small() -> None:
    first = modules_of_first_paint() | {
        PAGE / name for name in ("index.html", "style.css", "text.css", "icons/icon.svg")
    }
    assert {path for path in first if path.name in ("katex.js", "lowlight.js", "uplot.js")} == set()

    assert sum(len(gzip.compress(path.read_bytes())) for path in first) <= FIRST_PAINT_BYTES_MAX
    assert sum(path.stat().st_size for path in PAGE.rglob("*") if path.is_file()) <= FOLDER_BYTES_MAX


def test_index_html_names_every_module_of_the_first_paint() -> None:
    named = re.findall(r'<link rel="modulepreload" href="([^"]+)">', (PAGE / "index.html").read_text())
    needed = {str(path.relative_to(PAGE)) for path in modules_of_first_paint()} - {"main.js"}

    assert set(named) == needed
    assert named == sorted(named)


def test_the_page_has_only_relative_addresses_and_no_inline_code() -> None:
    html = (PAGE / "index.html").read_text()
    addresses = re.findall(r'(?:href|src)="([^"]*)"', html)

    assert addresses
    assert [address for address in addresses if re.match(r"[a-z]+:|/", address)] == []
    assert re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", html) is None
    manifest = json.loads((PAGE / "manifest.webmanifest").read_text())
    assert all((PAGE / icon["src"]).is_file() for icon in manifest["icons"])


def test_no_module_of_ours_makes_elements_of_text() -> None:
    ours = [path for path in PAGE.rglob("*.js") if VENDOR not in path.parents]
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function")

    assert len(ours) > 20
    assert [path.name for path in ours if forbidden.search(path.read_text())] == []
