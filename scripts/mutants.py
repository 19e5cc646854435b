"""Change the core in small ways, one at a time, and count how many of the changes the tests notice.

    python scripts/mutants.py [--count 240] [--seed 0] [--tree FOLDER] [--coverage FILE] [--lines FILE] [--out FILE]
    python scripts/mutants.py --survivors-of FILE --tree FOLDER ...

First the quick tests that need no vLLM run once, to record which tests reach which line (into --coverage, unless that
file exists). Then each mutant (another comparison, operator, constant or condition, or a statement that is left out) is
judged by the tests that reach its line in their own process, the most specific first. FOLDER is a checkout whose tests
are judged against the `src` of this one. With the same --seed and --lines (a recording, of the larger suite), two
suites are asked about the same mutants. With --survivors-of, only those that another suite let live are judged: it
bounds from above what FOLDER's suite kills, since all others count as killed by it. Needs pytest-cov.
"""

from __future__ import annotations

import ast
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = (
    "algo",
    "base",
    "config",
    "inference",
    "launch",
    "journal",
    "orchestrator",
    "trainer",
    "transport",
    "messages.py",
)
TOOLS = ("doctor", "cluster", "workspace", "gepa", "check_", "advice", "estimate", "formats")  # in the core's folders
COPIED = (
    "src",
    "packages",
    "tests",
    "configs",
    "environments",
    "models",
    "scripts",
    "docs",
    "pyproject.toml",
    "benchmarks",
)
LIMIT_S = 200.0  # for one mutant
AT_ONCE = 2
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
}  # fmt: skip
LEFT_ALONE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise, ast.Assert, ast.JoinedStr)


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/trireme
    line: int
    what: str
    source: str  # of the whole file, mutated


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--coverage", type=Path, default=Path(tempfile.gettempdir()) / "mutants.coverage")
    parser.add_argument("--lines", type=Path, help="recording that the mutants are drawn from; that of --coverage")
    parser.add_argument("--survivors-of", type=Path, help="an --out of another suite")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not arguments.coverage.exists():
        record(arguments.tree, arguments.coverage)
    tests = read_coverage(arguments.coverage)
    lines = read_coverage(arguments.lines) if arguments.lines else tests
    mutants = draw(arguments.count, arguments.seed, {place for place, reached_by in lines.items() if reached_by})
    if arguments.survivors_of:
        killed = [row["outcome"] in ("killed", "too slow") for row in json.loads(arguments.survivors_of.read_text())]
        mutants = [mutant for mutant, is_killed in zip(mutants, killed, strict=True) if not is_killed]
    report(mutants, judge(mutants, tests, arguments.tree), arguments.out)


# which tests reach which line


def record(tree: Path, data: Path) -> None:
    """Run the tests of `tree` that need no vLLM against the `src` of this checkout, with coverage by test.

    Each folder of tests has a recording of its own, so that what spoils one spoils no other.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = _copy(tree, Path(folder) / "tree")
        words = "-m pytest -n 3 --cov=src/trireme --cov-context=test --cov-report="
        parts = []
        for tests in sorted(path for path in place.glob("tests/[pu]*/*") if path.is_dir() and any(path.glob("test_*"))):
            parts.append(f"{folder}/{tests.parent.name}-{tests.name}.coverage")
            command = [sys.executable, *words.split(), "-m", "not slow and not e2e", str(tests)]
            subprocess.run(command, cwd=place, env=_environ(place) | {"COVERAGE_FILE": parts[-1]})
        coverage, file = [sys.executable, "-m", "coverage"], f"--data-file={data.resolve()}"
        subprocess.run([*coverage, "combine", file, *filter(os.path.exists, parts)], cwd=place, check=True)
        subprocess.run([*coverage, "report", file, "--format=total"], cwd=place)
        failed = place / ".pytest_cache" / "v" / "cache" / "lastfailed"
        _failed_file(data).write_text(failed.read_text() if failed.exists() else "{}")


def _failed_file(data: Path) -> Path:
    """Return where the tests are that fail without a mutant: they judge none."""
    return data.with_suffix(".failed.json")


def read_coverage(file: Path) -> dict[tuple[str, int], dict[str, int]]:
    """By file and line: the test functions that reach it in their own process, with how many lines each reaches."""
    import coverage

    data = coverage.CoverageData(str(file))
    data.read()
    broken = {test.split("[")[0] for test in json.loads(_failed_file(file).read_text())}
    reached: dict[tuple[str, int], set[str]] = {}
    for path in data.measured_files():
        name = path.split("/src/trireme/")[-1]
        for line, contexts in data.contexts_by_lineno(path).items():
            tests = {context.split("|")[0].split("[")[0] for context in contexts if "::" in context}
            reached[name, line] = tests - broken
    size = Counter(test for tests in reached.values() for test in tests)
    return {place: {test: size[test] for test in tests} for place, tests in reached.items()}


# mutants


def draw(count: int, seed: int, places: set[tuple[str, int]]) -> list[Mutant]:
    """A sample of the core's mutants, the same for the same seed and sources."""
    found = []
    for path in sorted((ROOT / "src" / "trireme").rglob("*.py")):
        name = str(path.relative_to(ROOT / "src" / "trireme"))
        if name.startswith(CORE) and not any(tool in name for tool in TOOLS):
            found += [(name, number, line) for number, line in sites(path.read_text()) if (name, line) in places]
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    return [mutated(name, number, line) for name, number, line in chosen]


def sites(source: str) -> Iterator[tuple[int, int]]:
    """The number and line of each place that can be changed."""
    for number, (node, _) in enumerate(_candidates(ast.parse(source))):
        yield number, node.lineno


def mutated(name: str, number: int, line: int) -> Mutant:
    tree = ast.parse((ROOT / "src" / "trireme" / name).read_text())
    node, change = list(_candidates(tree))[number]
    before = ast.unparse(node)
    after = change()
    return Mutant(name, line, f"{before[:70]} -> {after}", ast.unparse(ast.fix_missing_locations(tree)))


def _candidates(tree: ast.Module) -> Iterator[tuple]:
    """Each with a function that makes the change in place, and says what is there then."""
    for parent in ast.walk(tree):
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in _own_nodes(parent):
                yield from _changes(node)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function's body, without functions inside it, annotations and docstrings."""
    queue = list(function.body)  # type: ignore[attr-defined]
    while queue:
        node = queue.pop(0)
        if isinstance(node, LEFT_ALONE):
            continue
        yield node
        queue += [child for name, child in _children(node) if name not in ("annotation", "returns")]


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        values = value if isinstance(value, list) else [value]
        yield from ((name, child) for child in values if isinstance(child, ast.AST))


def _changes(node: ast.AST) -> Iterator[tuple]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield node, lambda: _set(node, "ops", [COMPARISONS[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_text(node.left):
            yield node, lambda: _set(node, "op", OPERATORS[type(operator)]())
        case ast.BoolOp(op=operator):
            yield node, lambda: _set(node, "op", ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield node, lambda: _set(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        case ast.Constant(value=bool(value)):
            yield node, lambda: _set(node, "value", not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, lambda: _set(node, "value", value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()) if not _is_log(node):
            yield node, lambda: _set(node, "value", ast.Constant(None))
        case ast.If() | ast.IfExp() | ast.While():
            test = node.test
            yield node.test, lambda: _set(node, "test", ast.UnaryOp(ast.Not(), test), told=test)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield node, lambda: _set(node, "value", ast.Constant(None))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _set(node: ast.AST, field: str, value: object, told: ast.AST | None = None) -> str:
    setattr(node, field, value)
    return f"not ({ast.unparse(told)[:60]})" if told is not None else ast.unparse(ast.fix_missing_locations(node))[:70]


def _is_log(node: ast.Expr) -> bool:
    return ast.unparse(node).startswith(("log.", "rate_limited.", "print("))


# judging


def judge(mutants: Sequence[Mutant], tests: dict, tree: Path) -> list[str]:
    """Fork a process per mutant, from one that has imported the large libraries. Returns: killed, survived, …"""
    _import_libraries()
    outcomes = ["unreached"] * len(mutants)
    waiting = [number for number, mutant in enumerate(mutants) if tests.get((mutant.file, mutant.line))]
    with tempfile.TemporaryDirectory() as folder:
        free = [_copy(tree, Path(folder) / str(number)) for number in range(AT_ONCE)]
        running: dict[int, tuple[int, Path, float]] = {}
        while waiting or running:
            while waiting and free:
                number, place = waiting.pop(0), free.pop()
                reached_by = tests[mutants[number].file, mutants[number].line]
                pid = _fork(mutants[number], place, sorted(reached_by, key=reached_by.__getitem__))
                running[pid] = (number, place, time.monotonic())
            time.sleep(0.05)
            for pid, (number, place, began) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                is_late = time.monotonic() - began > LIMIT_S
                if not ended and not is_late:
                    continue
                if not ended:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                outcomes[number] = _outcome(os.waitstatus_to_exitcode(status)) if ended else "too slow"
                mutant = mutants[number]
                shutil.copy(ROOT / "src/trireme" / mutant.file, place / "src/trireme" / mutant.file)
                free.append(place)
                del running[pid]
                print(f"{outcomes[number]:9} {mutant.file}:{mutant.line}  {mutant.what}", flush=True)
    return outcomes


def _outcome(code: int) -> str:
    """Of pytest's exit code: 0 passed, 1 a test failed, 2 collection failed, 4 and 5 no such tests."""
    return {0: "survived", 4: "unreached", 5: "unreached"}.get(code, "killed")


def _import_libraries() -> None:
    """Import all, and forget what is ours: each mutant imports that from its own copy."""
    sys.path[:0] = _modules(ROOT)
    import hypothesis
    import pytest
    import xdist

    import trireme.orchestrator.loop
    import trireme.trainer.loop  # noqa: F401

    del hypothesis, pytest, xdist
    for name in [name for name in sys.modules if name.partition(".")[0] in ("trireme", "trireme_worker")]:
        del sys.modules[name]
    gc.freeze()


def _copy(tree: Path, place: Path) -> Path:
    place.mkdir()
    for name in COPIED:
        source = (ROOT if name in ("src", "packages") else tree) / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
    return place


def _environ(place: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(_modules(place)), "PYTHONDONTWRITEBYTECODE": "1"}


def _modules(checkout: Path) -> list[str]:
    return [str(checkout / "src"), str(checkout / "packages" / "trireme-worker")]


def _fork(mutant: Mutant, place: Path, tests: list[str]) -> int:
    (place / "src" / "trireme" / mutant.file).write_text(mutant.source)
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    with open(place / "log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(place)
    sys.path[:] = [*_modules(place), *(path for path in sys.path if path not in _modules(ROOT))]
    os.environ |= _environ(place)
    import pytest

    code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    sys.stdout.flush()
    os._exit(code)


def report(mutants: Sequence[Mutant], outcomes: Sequence[str], out: Path | None) -> None:
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes).most_common()))
    if out is not None:
        rows = [vars(m) | {"source": "", "outcome": o} for m, o in zip(mutants, outcomes, strict=True)]
        out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
