"""Floors and faces: which folders, and which modules of them, a folder may import; lazy and type-only imports too."""

import ast
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
FILES_MAX: Final = 25
DIALECTS: Final = {"common", "openai", "anthropic", "responses", "ollama"}

# Each folder, or module that stands beside folders, with those of its own package that it may import.
# `memory` takes from `config` only the settings, as plain structs.
GATEWAY: Final = {
    "wall_clock": "",
    "task_set": "",
    "link": "",
    "errors": "",
    "failed": "",
    "admin_types": "",
    "supervisor": "link",
    "model_files": "failed admin_types",
    "home": "failed",
    "connect": "failed",
    "telemetry": "errors supervisor",
    "config": "errors failed home model_files",
    "install": "failed home",
    "keep_awake": "config",
    "desktop": "link supervisor config",
    "access": "errors failed home telemetry config",
    "memory": "link supervisor model_files config",
    "pool": "link supervisor model_files config memory",
    "nodes": "failed home link supervisor model_files config memory pool",
    "media": "errors model_files telemetry config",
    "peers": "task_set link errors admin_types supervisor model_files telemetry config pool",
    "request": "link errors admin_types supervisor model_files telemetry config access pool media peers",
    "http": "wall_clock errors admin_types telemetry config request",
    "services": "task_set home link telemetry config access pool media peers request http",
    "adapter_loads": "model_files config",
    "reload": "adapter_loads errors admin_types telemetry config access pool services",
    "api.common": "link errors supervisor config media request http services",
    "admin": "adapter_loads errors admin_types supervisor model_files config access peers request http services reload",
    "api.openai": "errors config media request http services api.common",
    "api.anthropic": "errors config media request http services api.common api.openai",
    "api.ollama": "errors supervisor model_files config access media request http services api.common api.openai",
    "api.responses": "wall_clock errors config media request http services api.common api.openai",
    "web": "errors failed connect admin_types supervisor memory model_files telemetry config access request http "
    "services reload admin",
    "middleware": "errors telemetry config access request http services api.anthropic api.ollama",
    "api": "link errors admin_types supervisor model_files telemetry config access media peers request http services "
    "api.common api.openai api.anthropic api.responses api.ollama",
    "app": "link telemetry config pool services reload admin api.openai api.anthropic api.responses api.ollama "
    "middleware api web",
    "daemon": "link errors supervisor telemetry config keep_awake desktop access pool nodes http reload app",
    "main": "supervisor home telemetry config access nodes http daemon",
    "ctl": "errors failed home admin_types supervisor model_files connect telemetry config install access memory nodes "
    "media main",
}
WORKER: Final = {
    "text": "",
    "errors": "text",
    "parsers": "text",
    "vision": "errors",
    "speculation": "errors",
    "experts": "",
    "model": "errors vision speculation experts",
    "structured": "text errors parsers",
    "cache": "errors vision model",
    "adapters": "errors model cache",
    "sampling": "structured",
    "drafting": "errors vision model speculation cache",
    "pacing": "model speculation",
    "sparse": "errors vision model cache",
    "engine": "text errors parsers vision model speculation structured cache sampling sparse drafting pacing adapters "
    "experts",
    "frames": "text engine",
    "prompt": "text errors parsers vision model speculation structured sampling sparse adapters engine",
    "jobs": "model engine pacing",
    "embedding": "errors vision model engine jobs",
    "link": "engine frames",
    "audio": "errors vision model engine jobs",
    "take_requests": "engine link prompt",
    "start_reader": "embedding engine link model pacing take_requests",
    "start_audio": "audio engine link model pacing take_requests",
    "take_prompts": "adapters model engine link prompt take_requests",
    "checked_model": "errors model adapters sparse drafting engine prompt",
    "group": "errors model cache engine",
    "start_text": "errors vision model adapters cache kv_publisher group engine prompt link checked_model "
    "take_requests take_prompts",
    "main": "errors model jobs embedding group engine link start_text start_reader start_audio",
    "verify": "errors vision model adapters group engine prompt checked_model sparse speculation embedding audio",
    "calibrate": "errors model speculation engine pacing prompt embedding checked_model",
    "repack": "errors experts model",
    "kv_publisher": "cache",
    "__main__": "main",
}

# Stems that two modules share, because they are the same thing on two sides.
SHARED_STEMS: Final = {
    "request": "a dialect's", "response": "a dialect's", "encoder": "a dialect's, and their protocol",
    "endpoints": "a dialect's or the admin app's",
    "schemas": "of the page's bodies, and JSON schemas of tools",
    "lowering": "a dialect's", "tools": "a dialect's",
    "messages": "a chat's in OpenAI's dialect, and the protocol's",
    "chat": "its endpoint and its verb", "models": "their endpoint and their verb", "logs": "they and their verb",
    "requests": "their endpoint and their verb", "search": "it and its verb", "upgrade": "it and its verb",
    "usage": "it and its verb",
    "verify": "its verb, its program and its messages", "verb": "of a verb with a folder of its own",
    "client": "the verbs' and the benchmarks'",
    "link": "the two ends of the sockets", "main": "of a process", "errors": "of a process", "cli": "of a program",
    "repack": "its verb and its program",
    "infill": "its endpoint, and its prompts",
    "inbox": "messages for a loop: the supervisor's, the engine's",
    "events": "the link's and the parsers'",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    files = [file for package in ("gateway", "worker", "protocol") for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def folder(module: str) -> str:
    """The folder of a module below its package, the module's own name beside folders, or `protocol`."""
    package, *rest = module.split(".")
    if package == "protocol" or not rest:
        return package
    return "api." + rest[1] if rest[0] == "api" and len(rest) > 1 and rest[1] in DIALECTS else rest[0]


@cache
def imports(module: str) -> frozenset[str]:
    """Everything that a module imports anywhere in it: our modules in full, others as written."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def face(folder: str) -> set[str]:
    """The modules in the `__all__` of a folder, which is read without being run."""
    names: set[str] | None = None
    defined = {"__version__"}
    for node in ast.parse(modules()[folder].read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("__all__")]) | ast.AnnAssign(target=ast.Name("__all__")):
                names = set(ast.literal_eval(node.value or ast.List()))
            case ast.ImportFrom():
                defined |= {alias.name for alias in node.names}
            case ast.FunctionDef():
                defined.add(node.name)
            case _:
                pass
    assert names is not None, f"{folder} has no face: give its __init__ an __all__"
    absent = {name for name in names - defined if f"{folder}.{name}" not in modules()}
    assert absent == set(), f"{folder} has a face of things that do not exist"
    return names - defined


def crossed(importer: str, imported: str) -> list[tuple[str, str]]:
    """Each folder that the import enters from outside, with the name that it takes there."""
    steps = imported.split(".")
    entered = [(".".join(steps[:end]), steps[end]) for end in range(1, len(steps))]
    return [(folder, name) for folder, name in entered if not f"{importer}.".startswith(f"{folder}.")]


def test_the_face_of_a_folder_is_the_modules_that_other_folders_import() -> None:
    taken: defaultdict[str, set[str]] = defaultdict(set)
    for importer in modules():
        for imported in imports(importer) & modules().keys():
            for folder, name in crossed(importer, imported):
                taken[folder].add(name)
    faces = {module: face(module) for module, file in modules().items() if file.name == "__init__.py"}
    hidden = {folder: names - faces[folder] for folder, names in taken.items() if names - faces[folder]}
    assert hidden == {}, "import a module of the folder's face, or make this one part of it"
    idle = {folder: names - taken[folder] for folder, names in faces.items() if names - taken[folder]}
    assert idle == {}, "no other folder imports these: take them off the face"


@pytest.mark.parametrize(("package", "allowed"), [("gateway", GATEWAY), ("worker", WORKER)])
def test_a_folder_imports_only_the_floors_below_it(package: str, allowed: dict[str, str]) -> None:
    ours = {module: folder(module) for module in modules() if module.startswith(f"{package}.")}
    assert set(ours.values()) <= allowed.keys(), "a folder has no floor yet: add it to the table"
    climbing = [
        f"{module} imports {other}"
        for module, here in ours.items()
        for other in imports(module) & ours.keys()
        if ours[other] not in {here, *allowed[here].split()}
    ]
    assert climbing == []
    graph = TopologicalSorter({here: set(below.split()) for here, below in allowed.items()})
    graph.prepare()  # raises CycleError


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: (imports(module) & modules().keys()) - {module} for module in modules()}
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("here", ["link", "supervisor", "memory"])
def test_supervision_knows_neither_http_nor_the_configuration_file(here: str) -> None:
    forbidden = ("starlette", "uvicorn", "http", "tomllib", "gateway.errors", "gateway.api", "gateway.http")
    for module in modules():
        if module.startswith(f"gateway.{here}"):
            ours = {name for name in imports(module) if name.startswith("gateway.config")}
            assert ours <= ({"gateway.config.settings"} if here == "memory" else set()), module
            assert not {name for name in imports(module) if name.startswith(forbidden)}, module


def test_only_a_few_folders_import_mlx() -> None:
    allowed = {
        "engine",
        "cache",
        "model",
        "vision",
        "drafting",
        "embedding",
        "experts",
        "sampling",
        "adapters",
        "group",
        "sparse",
        "audio",
    }
    importers = {
        module for module in modules() if any(name.split(".")[0].startswith("mlx") for name in imports(module))
    }
    # The mask of a grammar is applied to the logits, where they are; a program writes a model's arrays.
    others = {module for module in importers if folder(module) not in allowed}
    assert others <= {"worker.structured.masks", "worker.tools.repack"}


def test_a_folder_has_few_files_and_says_what_it_is() -> None:
    count: defaultdict[Path, int] = defaultdict(int)
    for module, file in modules().items():
        if file.name != "__init__.py":
            count[file.parent] += 1
        else:
            assert ast.get_docstring(ast.parse(file.read_text())), f"{module} has no docstring"
    assert {str(path.relative_to(ROOT)): files for path, files in count.items() if files > FILES_MAX} == {}


def test_no_two_modules_share_a_stem_but_for_a_reason() -> None:
    stems: defaultdict[str, list[str]] = defaultdict(list)
    for module, file in modules().items():
        if not file.name.startswith("__"):
            stems[file.stem].append(module)
    assert {stem: names for stem, names in stems.items() if len(names) > 1 and stem not in SHARED_STEMS} == {}
