"""Which package may import which. The tables below are the documentation of the layers."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from parsing import parse

SOURCE = Path(__file__).parents[3] / "src" / "trireme"

LAYERS = {
    "base": 0,
    "config": 1,
    "messages": 1,
    "algo": 2,
    "journal": 3,
    "transport": 3,
    "monitor": 4,
    "launch": 5,
    "orchestrator": 5,
    "trainer": 5,
    "inference": 5,
    "tools": 6,
    "cli": 7,
}
"""An import goes to a lower layer, or stays in its own package. So nothing but `cli` imports `tools`: without that
folder, the rest still trains."""

SUB_PACKAGES = {
    "orchestrator": ("environments", "engines", "weights", "rollout", "evaluation", "gateway"),
    "trainer": ("parallel", "optim", "model", "checkpoint", "publish", "sft"),
}
"""Packages inside of a package. They import each other in one direction only, and never the loop above them."""

LOOPS = {"orchestrator": {"loop", "scheduler", "batcher", "status"}, "trainer": {"loop", "try_step"}}
"""Modules of a package that its sub-packages never import."""

LIGHT = ("base", "config", "messages", "journal", "monitor", "launch", "orchestrator")
"""Packages that start at once and run where there is no torch."""

HEAVY = {"torch", "transformers", "vllm", "safetensors", "accelerate"}

WORKER = SOURCE / "orchestrator" / "environments" / "worker"
"""Runs under the environment's own interpreter, where nothing of ours is installed."""

WORKER_MAY_IMPORT = {"verifiers", "openai", "aiohttp", "httpx"}  # the latter two come with verifiers

FILES = [path for path in sorted(SOURCE.rglob("*.py")) if WORKER not in path.parents]


class Import(NamedTuple):
    file: Path
    line: int
    module: str

    @property
    def package(self) -> str:
        return package_of(self.file)

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} imports {self.module}"


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> Iterator[Import]:
    """At any level, also inside functions and for types only. A relative import counts as one of `trireme`."""
    for node in ast.walk(parse(file.read_text())):
        match node:
            case ast.Import():
                yield from (Import(file, node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    yield Import(file, node.lineno, f"{module}.{alias.name}" if module == "trireme" else module)
            case ast.ImportFrom():
                yield Import(file, node.lineno, "trireme.(a relative import)")


@cache
def all_imports() -> list[Import]:
    return [found for file in FILES for found in imports_of(file)]


def test_imports_go_down_a_layer_never_up_and_never_sideways():
    assert {package_of(file) for file in FILES} - {"__init__"} == set(LAYERS)
    ours = [(found, found.module.split(".")[1]) for found in all_imports() if found.module.startswith("trireme.")]
    assert len(ours) > 100
    wrong = [(str(i), to) for i, to in ours if i.package != to and LAYERS.get(to, 99) >= LAYERS[i.package]]
    assert wrong == []


@pytest.mark.parametrize("package", SUB_PACKAGES)
def test_sub_packages_import_each_other_one_way_and_never_the_loop_of_their_package(package: str):
    found = {part.name for part in (SOURCE / package).iterdir() if part.is_dir() and part.name != "__pycache__"}
    assert found == set(SUB_PACKAGES[package])
    arrows: dict[tuple[str, str], str] = {}
    for each in all_imports():
        inside, parts = each.file.relative_to(SOURCE).parts, each.module.split(".")
        if inside[0] == package and len(inside) > 2 and parts[:2] == ["trireme", package] and parts[2] != inside[1]:
            arrows[inside[1], parts[2]] = str(each)
    assert arrows
    assert [arrow for (start, end), arrow in arrows.items() if (end, start) in arrows] == []
    assert [arrow for (_, end), arrow in arrows.items() if end in LOOPS[package]] == []


def test_packages_that_need_no_torch_never_name_it():
    named = [found for found in all_imports() if found.module.split(".")[0] in HEAVY]
    assert [str(found) for found in named if found.package in LIGHT] == []


def test_no_import_goes_round_in_circles():
    """A module that imports another at its top, which in the end imports the first."""
    names = {".".join(("trireme", *file.relative_to(SOURCE).with_suffix("").parts)): file for file in FILES}
    edges = {name.removesuffix(".__init__"): _imported_at_the_top(file) for name, file in names.items()}
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert sorted(edges) == []


def _imported_at_the_top(file: Path) -> set[str]:
    nodes = parse(file.read_text()).body
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def test_environment_workers_import_nothing_that_their_interpreter_may_lack():
    flat = {path.stem for path in WORKER.rglob("*.py")}
    allowed = sys.stdlib_module_names | WORKER_MAY_IMPORT | flat
    assert len(flat) > 3
    needed = [found for file in WORKER.rglob("*.py") for found in imports_of(file) if not _can_do_without(found)]
    assert [str(found) for found in needed if found.module.split(".")[0] not in allowed] == []


def _can_do_without(found: Import) -> bool:
    return any(
        node.lineno < found.line < node.handlers[0].lineno
        for node in ast.walk(parse(found.file.read_text()))
        if isinstance(node, ast.Try) and node.handlers and getattr(node.handlers[0].type, "id", "") == "ImportError"
    )


def test_no_file_is_named_after_nothing_and_init_files_do_nothing():
    nothing = {"utils", "util", "helpers", "helper", "common", "misc"}
    files = list(SOURCE.rglob("*.py"))
    assert [str(path) for path in files if path.stem in nothing or (path.stem == "__init__" and path.read_text())] == []
