"""The house: what may import what. The tables below are its documentation."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

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

DEADLINE_S = 120


class Import(NamedTuple):
    file: Path
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.line} imports {self.module}"


def python_files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if WORKER not in path.parents)


def imports_of(file: Path) -> Iterator[Import]:
    """At any level, also inside functions and for types only. A relative import counts as one of `trireme`."""
    for node in ast.walk(parse(file.read_text())):
        match node:
            case ast.Import():
                yield from (Import(file, node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                for alias in node.names:
                    name = f"{module}.{alias.name}" if module == "trireme" else module
                    yield Import(file, node.lineno, name)
            case ast.ImportFrom():
                yield Import(file, node.lineno, "trireme.(a relative import)")


@cache
def all_imports() -> list[Import]:
    return [found for file in python_files() for found in imports_of(file)]


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def may_reach(room: str, target: str) -> bool:
    return room == target or FLOORS.get(target, 99) < FLOORS[room]


def test_every_room_has_its_floor() -> None:
    assert {room_of(file) for file in python_files()} - {"__init__"} == set(FLOORS)


def test_imports_go_down_a_floor_never_up_and_never_sideways() -> None:
    ours = [found for found in all_imports() if found.module.split(".")[0] == "trireme"]
    assert len(ours) > 100
    wrong = [str(found) for found in ours if not may_reach(room_of(found.file), found.module.split(".")[1])]
    assert wrong == []


def test_rooms_that_need_no_torch_never_name_it() -> None:
    wrong = [
        str(found) for found in all_imports() if room_of(found.file) in LIGHT and found.module.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_no_import_goes_round_in_circles() -> None:
    """A module that imports another at its top, which in the end imports the first."""
    files = {_module(file): file for file in python_files()}
    edges = {name: _imported_at_the_top(file) & files.keys() for name, file in files.items()}
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for leaf in leaves:
            del edges[leaf]
    assert sorted(edges) == []


def _module(file: Path) -> str:
    return ".".join(("trireme", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


def _imported_at_the_top(file: Path) -> set[str]:
    nodes = parse(file.read_text()).body
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


@pytest.mark.parametrize(
    "modules",
    [
        ["trireme.orchestrator.loop", "trireme.cli.orchestrator"],
        ["trireme.launch.supervise", "trireme.launch.plan", "trireme.monitor.live", "trireme.config.load"],
        ["trireme.cli.rl", "trireme.cli.sft", "trireme.cli.trainer", "trireme.cli.inference"],
    ],
    ids=["orchestrator", "launcher", "doors"],
)
def test_starting_it_loads_no_torch(modules: list[str]) -> None:
    code = f"import sys, {', '.join(modules)}; print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == []


def test_environment_workers_import_nothing_that_their_interpreter_may_lack() -> None:
    flat = {path.stem for path in WORKER.glob("*.py")}
    allowed = sys.stdlib_module_names | WORKER_MAY_IMPORT | flat
    assert len(flat) > 3
    needed = [
        entry for file in sorted(WORKER.rglob("*.py")) for entry in imports_of(file) if not _can_do_without(entry)
    ]
    assert [str(entry) for entry in needed if entry.module.split(".")[0] not in allowed] == []


def _can_do_without(entry: Import) -> bool:
    """Imported under `except ImportError`."""
    return any(
        node.lineno < entry.line < node.handlers[0].lineno
        for node in ast.walk(parse(entry.file.read_text()))
        if isinstance(node, ast.Try) and node.handlers and getattr(node.handlers[0].type, "id", "") == "ImportError"
    )


@pytest.mark.parametrize("name", ["utils", "util", "helpers", "helper", "common", "misc"])
def test_no_file_is_named_after_nothing(name: str) -> None:
    assert [str(path) for path in SOURCE.rglob("*") if path.stem == name] == []


def test_init_files_do_nothing() -> None:
    assert [str(path) for path in SOURCE.rglob("__init__.py") if path.read_text().strip()] == []


def test_a_wrong_import_is_noticed_and_named(tmp_path: Path) -> None:
    """Of this test itself: that the walk sees imports wherever they hide."""
    file = tmp_path / "wrong.py"
    file.write_text("from trireme import trainer\ndef f():\n    import torch.nn\n    from . import x\n")
    found = [(entry.line, entry.module) for entry in imports_of(file)]
    assert found == [(1, "trireme.trainer"), (3, "torch.nn"), (4, "trireme.(a relative import)")]
    assert not may_reach("orchestrator", "trainer")
    assert not may_reach("algo", "transport")
    assert may_reach("cli", "trainer")
