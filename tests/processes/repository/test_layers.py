"""Which package may import which. The tables below are the documentation of the layers."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from support.processes.parsing import parse

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "trireme"

LAYERS = {
    **{"base": 0, "config": 1, "messages": 1, "algo": 2, "journal": 3, "transport": 3, "monitor": 4},
    **{"launch": 5, "orchestrator": 5, "trainer": 5, "inference": 5, "tools": 6, "cli": 7},
}
"""An import goes to a lower layer, or stays in its own package. So only `cli` imports `tools`: without that folder, the
rest still trains."""

SUB_PACKAGES = {
    "orchestrator": {"environments", "engines", "weights", "rollout", "evaluation", "gateway", "session"},
    "trainer": {"parallel", "optim", "model", "checkpoint", "publish", "sft"},
    "tools": {"audit", "cluster", "dashboard", "datasets", "diff", "doctor", "environments", "evaluate"}
    | {"export", "formats", "gepa", "plan", "policies", "viewer"},
}
"""Packages inside of a package. They import each other in one direction only, and never the loop above them."""

LOOPS = {"orchestrator": {"loop", "scheduler", "batcher", "status"}, "trainer": {"loop", "try_step"}, "tools": set()}
"""Modules of a package that its sub-packages never import."""

LIGHT = {"base", "config", "messages", "journal", "monitor", "launch", "orchestrator"}
"""Packages that start at once and run where there is no torch."""

HEAVY = {"torch", "transformers", "vllm", "safetensors", "accelerate"}

WORKER = ROOT / "packages" / "trireme-worker" / "trireme_worker"
"""Runs under the environment's own interpreter, where nothing of ours is installed."""

WORKER_MAY_IMPORT = {"trireme_worker", "verifiers", "httpx"}  # the last one comes with verifiers

FILES = sorted(SOURCE.rglob("*.py"))


class Import(NamedTuple):
    file: Path
    line: int
    module: str  # or a name in it; a relative import counts as one of `trireme`
    is_at_top: bool = False
    is_optional: bool = False  # in a `try` that catches ImportError

    @property
    def package(self) -> str:
        return self.file.relative_to(SOURCE).parts[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(file: Path) -> Iterator[Import]:
    """Yield imports at any level, also inside functions and for types only."""
    tree = parse(file.read_text())
    nodes, at_top = list(ast.walk(tree)), set(tree.body)
    guarded = [(node.lineno, node.handlers[0].lineno) for node in nodes if catches_import_error(node)]
    for node in nodes:
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0, names=names):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.ImportFrom():
                modules = ["trireme.(a relative import)"]
            case _:
                continue
        is_optional = any(first < node.lineno < last for first, last in guarded)
        yield from (Import(file, node.lineno, module, node in at_top, is_optional) for module in modules)


def catches_import_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Try) and [getattr(each.type, "id", "") for each in node.handlers] == ["ImportError"]


@cache
def imports() -> list[Import]:
    """Imports of all that runs under our own interpreter."""
    return [found for file in FILES for found in imports_of(file)]


def test_imports_go_down_a_layer_never_up_and_never_sideways():
    assert {found.package for found in imports()} == set(LAYERS)
    ours = [(found, found.module.split(".")[1]) for found in imports() if found.module.startswith("trireme.")]
    assert len(ours) > 100
    wrong = [(str(i), to) for i, to in ours if i.package != to and LAYERS.get(to, 99) >= LAYERS[i.package]]
    assert wrong == []


@pytest.mark.parametrize("package", SUB_PACKAGES)
def test_sub_packages_import_each_other_in_one_direction(package):
    found = {part.name for part in (SOURCE / package).iterdir() if part.is_dir() and part.name != "__pycache__"}
    assert found == SUB_PACKAGES[package]
    arrows: set[tuple[str, str]] = set()
    for each in imports():
        inside, parts = each.file.relative_to(SOURCE).parts, each.module.split(".")
        if inside[0] == package and len(inside) > 2 and parts[:2] == ["trireme", package] and parts[2] != inside[1]:
            arrows.add((inside[1], parts[2]))
    assert arrows
    assert [arrow for arrow in arrows if arrow[::-1] in arrows or arrow[1] in LOOPS[package]] == []


def test_packages_that_need_no_torch_never_name_it():
    named = [found for found in imports() if found.module.split(".")[0] in HEAVY]
    assert [str(found) for found in named if found.package in LIGHT] == []


def test_no_import_goes_round_in_circles():
    """A module that imports another at its top, which in the end imports the first."""
    edges: dict[str, set[str]] = {}
    for found in imports():
        name = ".".join(("trireme", *found.file.relative_to(SOURCE).with_suffix("").parts))
        targets = edges.setdefault(name, set())
        if found.is_at_top:
            targets |= {found.module, found.module.rpartition(".")[0]}
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert sorted(edges) == []


def test_environment_workers_import_only_modules_they_always_have():
    files = list(WORKER.rglob("*.py"))
    allowed = sys.stdlib_module_names | WORKER_MAY_IMPORT
    needed = [found for file in files for found in imports_of(file) if not found.is_optional]
    assert len(needed) > 20
    assert [str(found) for found in needed if found.module.split(".")[0] not in allowed] == []


def test_both_sandboxes_have_the_same_kernel_file():
    shipped = ROOT / "environments" / "python_sandbox" / "python_sandbox_kernel.py"
    assert (WORKER / "agents" / "sandbox_kernel.py").read_text() == shipped.read_text()


def test_no_file_is_named_after_nothing_and_init_files_do_nothing():
    nothing = {"utils", "util", "helpers", "helper", "common", "misc"}
    files = [*FILES, *WORKER.rglob("*.py")]
    assert [file for file in files if file.stem in nothing or (file.stem == "__init__" and file.read_text())] == []
