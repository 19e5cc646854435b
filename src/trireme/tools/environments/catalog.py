"""Find and install environments: packages and files in `environments/`, and installed packages that use verifiers.

A list imports none of them: it must be quick, and must not run the code of an environment that the user did not name.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trireme.base.errors import ConfigError
from trireme.base.functions import names_at_the_top
from trireme.orchestrator.environments.venv import (
    BUILD_TIMEOUT_S,
    EnvironmentSource,
    environment_python,
    find_environment,
    installed_venv,
)
from trireme.tools.environments.progress import Progress

Kind = Literal["package", "file", "installed", "library"]

ROOT = Path("environments")
FRAMEWORK = "verifiers"
ENTRY_POINTS = ({"load_environment"}, {"load_taskset"}, {"dataset", "reward"})
"""A module that defines all names of one of these is an environment."""


@dataclass(frozen=True)
class Entry:
    """One environment, or a package without one (`library`).

    Example:
        Entry(id="reverse-text", kind="package", where="environments/reverse_text", venv="~/.cache/…/reverse_text-4c9a",
              verifiers="0.2.0", description="Reverse a short text, letter by letter.")
    """

    id: str  # for `[[orchestrator.env]]`
    kind: Kind
    where: str
    venv: str | None = None  # its own virtual environment; None where it has yet to be built, or needs none
    verifiers: str | None = None  # the version it runs with: as installed, else as its pyproject.toml asks for
    description: str = ""
    trouble: str = ""  # why it cannot be used


def find_source(name: str, root: Path) -> EnvironmentSource:
    """Find an environment by name. `root` may be the package's own folder too. Raises: ConfigError."""
    if (root / "pyproject.toml").is_file():
        return find_environment(str(root.resolve()), root=root.parent)
    return find_environment(name, root=root)


def build(source: EnvironmentSource, progress: Progress, *, again: bool = False) -> float:
    """Install an environment in a virtual environment of its own, and return the seconds that it took."""
    began = time.monotonic()
    with progress.stage(f"installing {source.id}", limit_s=BUILD_TIMEOUT_S):
        environment_python(source, again=again)
    return time.monotonic() - began


def build_if_missing(source: EnvironmentSource, progress: Progress) -> float | None:
    """Install an environment that has yet to be; return the seconds that it took, or None where nothing was to do.

    Commands do so before they start an event loop, in which it would delay Ctrl-C.
    """
    is_missing = source.folder is not None and installed_venv(source) is None
    return build(source, progress) if is_missing else None


def list_environments(root: Path) -> list[Entry]:
    """List all environments, sorted by name within their kinds; libraries last."""
    packages = [_package(project.parent, root) for project in sorted(root.glob("*/pyproject.toml"))]
    plain = [folder for folder in root.glob("*") if folder.is_dir() and not (folder / "pyproject.toml").exists()]
    files = []
    for file in sorted(file for folder in (root, *plain) for file in folder.glob("*.py")):
        if _is_environment(file):
            text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            files.append(Entry(str(file), "file", str(file), description=text.partition("\n")[0]))
    installed, version = [], None
    with suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(FRAMEWORK)
    for found in importlib.metadata.distributions():
        name, about = found.metadata["Name"], found.metadata["Summary"] or ""
        if _framework_version(found.requires) is not None and name not in {entry.id for entry in packages}:
            installed.append(Entry(name, "installed", str(found.locate_file("")), verifiers=version, description=about))
    libraries = [entry for entry in packages if entry.kind == "library"]
    return [
        *(entry for entry in packages if entry.kind == "package"),
        *files,
        *sorted(installed, key=lambda entry: entry.id),
        *libraries,
    ]


def _package(folder: Path, root: Path) -> Entry:
    try:
        source = find_environment(str(folder.resolve()), root=root)
        venv = installed_venv(source)
    except ConfigError as error:
        return Entry(folder.name, "package", str(folder), trouble=str(error))
    project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    project = project if isinstance(project, dict) else {}
    asked = _framework_version(project.get("dependencies", []))
    places = [below / name for below in (folder, folder / "src") for name in (f"{source.module}.py", source.module)]
    modules = [place / "__init__.py" if place.is_dir() else place for place in places]
    found = sorted(venv.glob(f"lib/python*/site-packages/{FRAMEWORK}-*.dist-info")) if venv else []
    versions = [path.name.removeprefix(f"{FRAMEWORK}-").removesuffix(".dist-info") for path in found]
    return Entry(
        id=str(project.get("name", folder.name)),
        kind="package" if asked is not None or any(map(_is_environment, modules)) else "library",
        where=str(folder),
        venv=str(venv) if venv else None,
        verifiers=versions[0] if versions else asked,
        description=str(project.get("description", "")),
    )


def _framework_version(dependencies: Any) -> str | None:
    """Return the version of verifiers in a list of dependencies; "" where any will do, None where none is needed."""
    for dependency in map(str, dependencies if isinstance(dependencies, list) else []):
        if match := re.match(rf"{FRAMEWORK}(?![\w.-])\s*(?:\[[^]]*\])?\s*([^;@]*)", dependency):
            return match[1].strip().removeprefix("==")
    return None


def _is_environment(file: Path) -> bool:
    """Return whether the module defines or imports an environment's entry points, without importing it."""
    try:
        names = names_at_the_top(file)
    except (OSError, ValueError, SyntaxError):
        return False
    return any(wanted <= names for wanted in ENTRY_POINTS)
