"""The environments that are here: packages and files in `environments/`, and installed packages that use verifiers.

Nothing of them is imported: a list must be there at once, and must not run anybody's code.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.venv import (
    BUILD_TIMEOUT_S,
    EnvironmentSource,
    environment_python,
    find_environment,
    installed_venv,
)
from trireme.tools.environments.progress import Progress

Kind = Literal["package", "file", "installed", "library"]

_MAKES_AN_ENVIRONMENT = ({"load_environment"}, {"load_taskset"}, {"dataset", "reward"})
_FRAMEWORK = "verifiers"
ROOT = Path("environments")


@dataclass(frozen=True)
class Entry:
    """One environment, or a package beside them that is none (`library`).

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def list_environments(root: Path, *, cache: Path | None = None) -> list[Entry]:
    """Sorted by name within their kinds; libraries last."""
    packages = [_package(project.parent, root, cache) for project in sorted(root.glob("*/pyproject.toml"))]
    files = [entry for file in _files(root) if (entry := _file(file)) is not None]
    libraries = [entry for entry in packages if entry.kind == "library"]
    return [entry for entry in packages if entry.kind == "package"] + files + _installed(packages) + libraries


def defined_names(file: Path) -> set[str]:
    """What a module defines or imports at its top level; nothing where it is no Python."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError):
        return set()
    return {name for statement in body for name in _names_in(statement)}


def makes_an_environment(names: set[str]) -> bool:
    return any(wanted <= names for wanted in _MAKES_AN_ENVIRONMENT)


def _names_in(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Assign():
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import() | ast.ImportFrom():
            yield from (alias.asname or alias.name for alias in statement.names)


def _package(folder: Path, root: Path, cache: Path | None) -> Entry:
    try:
        source = find_environment(str(folder.resolve()), root=root)
        venv = installed_venv(source, cache=cache)
    except ConfigError as error:
        return Entry(folder.name, "package", str(folder), trouble=str(error))
    project = _project(folder)
    asked = _pinned(project.get("dependencies", []))
    return Entry(
        id=str(project.get("name", folder.name)),
        kind="package" if asked is not None or _defines_one(folder, source) else "library",
        where=str(folder),
        venv=str(venv) if venv else None,
        verifiers=(_installed_version(venv) if venv else None) or asked,
        description=str(project.get("description", "")),
    )


def _project(folder: Path) -> dict[str, Any]:
    project = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    return project if isinstance(project, dict) else {}


def _defines_one(folder: Path, source: EnvironmentSource) -> bool:
    places = [below / name for below in (folder, folder / "src") for name in (f"{source.module}.py", source.module)]
    files = [place / "__init__.py" if place.is_dir() else place for place in places]
    return any(makes_an_environment(defined_names(file)) for file in files)


def _pinned(dependencies: Any) -> str | None:
    """The version of verifiers that is asked for; "" where any will do, None where none is needed."""
    for dependency in map(str, dependencies if isinstance(dependencies, list) else []):
        if match := re.match(rf"{_FRAMEWORK}(?![\w.-])\s*(?:\[[^]]*\])?\s*([^;@]*)", dependency):
            return match[1].strip().removeprefix("==")
    return None


def _installed_version(venv: Path) -> str | None:
    found = sorted(venv.glob(f"lib/python*/site-packages/{_FRAMEWORK}-*.dist-info"))
    return found[0].name.removeprefix(f"{_FRAMEWORK}-").removesuffix(".dist-info") if found else None


def _files(root: Path) -> list[Path]:
    """In the folder itself, and in its folders that are no packages (`examples/`)."""
    beside = [folder for folder in root.glob("*") if folder.is_dir() and not (folder / "pyproject.toml").exists()]
    return sorted(file for folder in (root, *beside) for file in folder.glob("*.py"))


def _file(file: Path) -> Entry | None:
    if not makes_an_environment(defined_names(file)):
        return None
    says = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return Entry(str(file), "file", str(file), description=says.partition("\n")[0])


def _installed(packages: list[Entry]) -> list[Entry]:
    """Distributions beside Trireme that ask for verifiers."""
    known = {entry.id for entry in packages}
    entries = [_distribution(each) for each in importlib.metadata.distributions() if _pinned(each.requires) is not None]
    return sorted((entry for entry in entries if entry.id not in known), key=lambda entry: entry.id)


def _distribution(found: importlib.metadata.Distribution) -> Entry:
    try:
        version: str | None = importlib.metadata.version(_FRAMEWORK)
    except importlib.metadata.PackageNotFoundError:
        version = None
    about = found.metadata
    place = str(found.locate_file(""))
    return Entry(about["Name"], "installed", place, verifiers=version, description=about["Summary"] or "")


def find_source(name: str, root: Path) -> EnvironmentSource:
    """Raises: ConfigError. `root` may be the package's own folder too."""
    if (root / "pyproject.toml").is_file():
        return find_environment(str(root.resolve()), root=root.parent)
    return find_environment(name, root=root)


def build(source: EnvironmentSource, progress: Progress, *, again: bool = False) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    with progress.stage(f"installing {source.id}", limit_s=BUILD_TIMEOUT_S):
        environment_python(source, again=again)
    return time.monotonic() - began
