"""The environments of a folder: write a package that works at once, from the files in `templates/`, and list them."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.venv import find_environment, installed_venv
from trireme.orchestrator.environments.verifiers_version import VERIFIERS
from trireme.tools.templates import render

ROOT = Path("environments")
DEFINES_ONE = re.compile(r"^(?:async )?def (?:load_environment|dataset)\b", re.MULTILINE)
KINDS = ("verifiers", "plain")
_TAKEN = {"verifiers", "datasets", "openai", "numpy", "torch", "pip", "uv", "hatchling", "test", "tests", "trireme"}
"""Modules that an environment of the same name would hide from itself."""

_TEMPLATES = Path(__file__).parent / "templates"


def write_environment(name: str, *, kind: str, root: Path) -> Path:
    """Write the package under `root` and return its folder. A crash leaves no partial package.

    Args:
        kind: one of `KINDS`.

    Raises: ConfigError for a name that cannot be used, or that is taken.
    """
    name = checked_name(name)
    folder = root / name.replace("-", "_")
    # both spellings of the name, and a file, would be found under the same id
    taken = next((path for path in (folder, root / name, folder.with_suffix(".py")) if os.path.lexists(path)), None)
    if taken is not None:
        raise ConfigError(
            f"{taken} exists already - expected no environment {name!r} there: nothing is overwritten. "
            f"Take another name (`trireme env init {name}-2`), or move {taken} away."
        )

    root.mkdir(parents=True, exist_ok=True)
    values = {"name": name, "module": folder.name, "kind": kind, "verifiers": VERIFIERS["v0"]}
    templates = {"pyproject.toml": "pyproject.toml", f"{folder.name}.py": f"{kind}.py", "README.md": "README.md"}
    # renamed as a whole, so that a crash leaves no half of a package under the name
    partial = root / f".{folder.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        for file, template in templates.items():
            (partial / file).write_text(render(_TEMPLATES, template, **values), encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def checked_name(name: str) -> str:
    """Return the name as packages write it, with dashes. Raises: ConfigError if it cannot be used."""
    with_dashes, module = name.replace("_", "-"), name.replace("-", "_")
    problem = None
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", with_dashes):
        problem = "it is not a valid package name"
    elif len(name) > 60:
        problem = f"it has {len(name)} letters, the limit is 60"
    elif keyword.iskeyword(module):
        problem = f"`{module}` is a keyword of Python"
    elif module in sys.stdlib_module_names or module in _TAKEN or module.startswith("trireme_"):
        problem = f"a module `{module}` exists already, which it would hide"
    if problem is None:
        return with_dashes
    raise ConfigError(
        f"{name!r} cannot be the name of an environment: {problem} - expected lower-case letters and digits in words "
        "joined by dashes, and no module's name. Take another, such as `trireme env init my-env`."
    )


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
