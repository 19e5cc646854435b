"""The house: what may import what. The tables below are its documentation."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from parsing import parse

SOURCE = Path(__file__).parents[2] / "src" / "trireme"

FLOORS = {
    "base": 0,
    "config": 1,
    "messages": 1,
    "algo": 2,
    "ledger": 3,
    "transport": 3,
    "monitor": 4,
    "launch": 5,
    "orchestrator": 5,
    "trainer": 5,
    "inference": 5,
    "cli": 6,
}
"""An import goes to a lower floor, or stays in its own room."""

LIGHT = ("base", "config", "messages", "ledger", "monitor", "launch", "orchestrator")
"""Rooms that start at once and run where there is no torch."""

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
    def room(self) -> str:
        return room_of(self.file)

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} imports {self.module}"


def room_of(file: Path) -> str:
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


def test_imports_go_down_a_floor_never_up_and_never_sideways():
    assert {room_of(file) for file in FILES} - {"__init__"} == set(FLOORS)
    ours = [(found, found.module.split(".")[1]) for found in all_imports() if found.module.startswith("trireme.")]
    assert len(ours) > 100
    wrong = [(str(i), to) for i, to in ours if i.room != to and FLOORS.get(to, 99) >= FLOORS[i.room]]
    assert wrong == []


def test_rooms_that_need_no_torch_never_name_it():
    named = [found for found in all_imports() if found.module.split(".")[0] in HEAVY]
    assert [str(found) for found in named if found.room in LIGHT] == []


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
    flat = {path.stem for path in WORKER.glob("*.py")}
    allowed = sys.stdlib_module_names | WORKER_MAY_IMPORT | flat
    assert len(flat) > 3
    needed = [found for file in WORKER.rglob("*.py") for found in imports_of(file) if not _can_do_without(found)]
    assert [str(found) for found in needed if found.module.split(".")[0] not in allowed] == []


def _can_do_without(found: Import) -> bool:
    """Imported under `except ImportError`."""
    return any(
        node.lineno < found.line < node.handlers[0].lineno
        for node in ast.walk(parse(found.file.read_text()))
        if isinstance(node, ast.Try) and node.handlers and getattr(node.handlers[0].type, "id", "") == "ImportError"
    )


def test_no_file_is_named_after_nothing_and_init_files_do_nothing():
    nothing = {"utils", "util", "helpers", "helper", "common", "misc"}
    files = list(SOURCE.rglob("*.py"))
    assert [str(path) for path in files if path.stem in nothing or (path.stem == "__init__" and path.read_text())] == []
