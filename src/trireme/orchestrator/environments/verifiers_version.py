"""Choose the version of verifiers for an environment: its imports decide between v0 and v1, within the declared range.

Most packages declare a lower bound alone (`verifiers>=0.1.8`), and the newest verifiers has no v0. So uv resolves their
dependencies under a constraint: the version that Trireme is tested with, or any other one that Trireme runs. A
constraint meets each declaration, wherever it is made (the package, an extra, a dependency of a dependency).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

VERIFIERS = {"v0": "verifiers==0.2.0", "v1": "verifiers==0.4.0"}
"""Versions that Trireme is tested with, by the API that an environment uses."""
RUNS = {"v0": "verifiers>=0.1.14,<=0.3.1", "v1": "verifiers>=0.4"}
"""All versions that Trireme runs. Before 0.1.14, v0 has no clients and no groups of rewards; v1 is settled from 0.4.
The pre-releases of 0.3.2 have no v0 any more."""
BESIDE = {"v0": ("mcp<2", "prime-sandboxes<0.3"), "v1": ()}
"""Constraints of what verifiers itself depends on without an upper bound. With newer ones, `MCPEnv` cannot be imported
and `SandboxEnv` cannot be made."""
TRAINS = ("deepspeed", "flash-attn", "liger-kernel", "vllm")
"""Packages of the extra `rl` of verifiers that train and serve models, which no worker does: gigabytes, and flash-attn
cannot be built without torch."""
ASKS_FOR_TRAINER = re.compile(r"verifiers\s*\[[^\]]*\brl\b", re.IGNORECASE)
PYTHON = {"v0": "<3.14", "v1": "<3.15"}
"""Pythons that those versions of verifiers install under."""

IMPORTS_V0 = re.compile(r"^\s*(?:import|from)\s+verifiers\b(?!\.v1\b)(?!\s+import\s+v1\b)", re.MULTILINE)
IMPORTS_V1 = re.compile(
    r"^\s*(?:(?:import|from)\s+verifiers\.v1\b|from\s+verifiers\s+import\s*(?:\([^)]*|[^(\n#]*)\bv1\b)", re.MULTILINE
)
MAKES_ONE = re.compile(
    r"^(?:async\s+)?def\s+load_environment\b|^load_environment\s*=|"
    r"^\s*from\s+\S+\s+import\s*(?:\([^)]*|[^(\n#]*)\bload_environment\b",
    re.MULTILINE,
)
NAMES_VERIFIERS = re.compile(r"verifiers\s*(?:\[[^\]]*\]\s*)?(?![\w.-])", re.IGNORECASE)
_NOT_ITS_CODE = {"tests", "test", "build", "dist", "node_modules", "site-packages", "__pycache__"}


@dataclass(frozen=True)
class VersionChoice:
    """The sets of constraints to resolve an environment's dependencies under: the first one that has a solution counts.

    Example:
        VersionChoice(api="v1", constraints=(("verifiers==0.4.0",), ("verifiers>=0.4",)))
    """

    api: Literal["v0", "v1"] | None = None
    constraints: tuple[tuple[str, ...], ...] = ()
    requirements: tuple[str, ...] = ()  # to install with a package that imports verifiers and does not declare it
    left_out: tuple[str, ...] = ()  # packages that are not installed, though the extra `rl` of verifiers names them
    is_certain: bool = True  # false: only the name `load_environment` speaks for v0, and verifiers may not be needed


def choose_version(folder: Path, project: dict[str, Any], others: Iterable[Path] = ()) -> VersionChoice:
    """Choose by the code of a package, or of the local packages that it depends on if its own imports no verifiers.

    Args:
        project: its pyproject.toml.
        others: folders of those local packages.
    """
    # the package's own imports decide; those of local packages count only if it has none
    code = list(_code_of(folder))
    imports = any(pattern.search(text) for pattern in (IMPORTS_V0, IMPORTS_V1) for text in code)
    decides = code if imports else [*code, *(text for other in others for text in _code_of(other))]
    v0, v1, makes_one = (
        any(pattern.search(text) for text in decides) for pattern in (IMPORTS_V0, IMPORTS_V1, MAKES_ONE)
    )

    needed = tuple(_undeclared(project)) if imports else ()
    left_out = _left_out(project)
    if v1 and not (v0 and makes_one):
        # in 0.1.14, environments of v1 are environments of v0
        return VersionChoice("v1", (*_tried("v1"), *(_tried("v0") if makes_one else ())), needed, left_out)
    if v0 or makes_one:
        return VersionChoice("v0", _tried("v0"), needed, left_out, is_certain=v0)
    return VersionChoice()


def _left_out(project: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages of the extra `rl` that are not installed: those that the package itself does not name."""
    if not any(map(ASKS_FOR_TRAINER.match, declarations(project))):
        return ()
    own = [each.lower().replace("_", "-") for each in _texts(table(project, "project").get("dependencies"))]
    return tuple(name for name in TRAINS if not any(re.match(rf"{name}(?![\w.-])", each) for each in own))


def _tried(api: Literal["v0", "v1"]) -> tuple[tuple[str, ...], ...]:
    # from the tested version to any other, and at last without the constraints of other packages
    with_others = ((VERIFIERS[api], *BESIDE[api]), (RUNS[api], *BESIDE[api]), (RUNS[api],))
    return tuple(dict.fromkeys(with_others))


def _code_of(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        inside = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part in _NOT_ITS_CODE for part in inside):
            yield path.read_text(errors="replace")


def _undeclared(project: dict[str, Any]) -> list[str]:
    """Return what to require for the import of verifiers: nothing if the package itself depends on it."""
    if any(map(NAMES_VERIFIERS.match, _texts(table(project, "project").get("dependencies")))):
        return []
    return declarations(project)[:1] or ["verifiers"]


def declarations(project: dict[str, Any]) -> list[str]:
    """Return each requirement of verifiers in a pyproject.toml: of the package, its extras and its groups.

    Example:
        declarations(project)  # ["verifiers>=0.1.8", "verifiers[rl]>=0.1.5"]
    """
    extras, groups = table(project, "project", "optional-dependencies"), table(project, "dependency-groups")
    lists = [table(project, "project").get("dependencies"), *extras.values(), *groups.values()]
    return [each for texts in lists for each in _texts(texts) if NAMES_VERIFIERS.match(each)]


def _texts(requirements: Any) -> list[str]:
    return [each.strip() for each in requirements if isinstance(each, str)] if isinstance(requirements, list) else []


def table(project: dict[str, Any], *path: str) -> dict[str, Any]:
    """Return a table of a pyproject.toml; an empty one if it has none, or something else there, which uv reports."""
    for name in path:
        inner = project.get(name)
        project = inner if isinstance(inner, dict) else {}
    return project
