"""Find, install and list environments: the packages and files in `environments/`."""

from __future__ import annotations

import re
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.venv import (
    BUILD_TIMEOUT_S,
    EnvironmentSource,
    environment_python,
    find_environment,
    installed_venv,
)
from trireme.tools.environments import progress

ROOT = Path("environments")
DEFINES_ONE = re.compile(r"^(?:async )?def (?:load_environment|dataset)\b", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """A package or file in `environments/`.

    Example:
        Entry(id="reverse-text", where="environments/reverse_text", state="installed",
              description="Reverse a short text, letter by letter.")
    """

    id: str  # for `[[orchestrator.env]]`
    where: str
    state: str  # installed, not yet or broken; - for a file, which needs no virtual environment
    description: str  # for a broken one, what is wrong


def build(source: EnvironmentSource, *, again: bool = False) -> float:
    """Install an environment in a virtual environment of its own, and return the seconds that it took."""
    began = time.monotonic()
    with progress.stage(f"installing {source.id}", limit_s=BUILD_TIMEOUT_S):
        environment_python(source, again=again)
    return time.monotonic() - began


def build_if_missing(source: EnvironmentSource) -> None:
    """Install an environment that has yet to be.

    Commands do so before they start an event loop, in which it would delay Ctrl-C.
    """
    if source.folder is not None and installed_venv(source) is None:
        build(source)


def list_environments(root: Path) -> list[Entry]:
    """List the packages and files in `root`, without running the code of any."""
    # packages have a project file; other folders are searched for plain files
    packages = [_package(project.parent, root) for project in sorted(root.glob("*/pyproject.toml"))]
    plain = [folder for folder in root.glob("*") if folder.is_dir() and not (folder / "pyproject.toml").exists()]
    files = []
    for file in sorted(file for folder in (root, *plain) for file in folder.glob("*.py") if file.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        if DEFINES_ONE.search(text):
            about = re.match(r'\s*"""(.*?)(?:"""|$)', text, re.MULTILINE)
            files.append(Entry(str(file), str(file), "-", about[1] if about else ""))
    return [*packages, *files]


def _package(folder: Path, root: Path) -> Entry:
    try:
        source = find_environment(str(folder.resolve()), root=root)
        state = "installed" if installed_venv(source) else "not yet"
    except ConfigError as error:
        return Entry(folder.name, str(folder), "broken", str(error))
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return Entry(project["name"], str(folder), state, str(project.get("description", "")))
