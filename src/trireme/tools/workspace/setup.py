"""A workspace: a folder to type commands in, with example configurations for a machine, environments and tiny models.

Nothing that is there is written over. What is large or shared is linked to where Trireme has it: one copy on disk, and
one virtual environment per environment, however many workspaces there are.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trireme.tools.workspace.shipped import Shipped
from trireme.tools.workspace.sized import Size, sized

PythonProject = Literal["linked", "kept", "needless"]

VF_RL = ("vf-rl/*.toml",)
PRIME_RL = ("prime-rl/*.toml", "*/rl.toml")
HOSTED = ("rl/*.toml", "gepa/*.toml", "*/rl.toml")

PROJECT = """\
# `uv run` takes what .venv here is a link to: the installation of Trireme that made this folder.

[project]
name = "@NAME@"
version = "0.1.0"
requires-python = ">=3.11,<3.14"
dependencies = ["trireme"]

[tool.uv]
managed = false
"""
UNMANAGED = "managed = false"  # uv reads such a project, and never installs for it


@dataclass
class Workspace:
    """A folder that is being set up.

    Example:
        workspace = Workspace(Path("lab"), find_shipped(), copies=False)
        workspace.write_examples(VF_RL, "cpu")
        workspace.kept  # [Path("configs/vf-rl/wordle.toml")]: it was there, and says something else
    """

    root: Path
    shipped: Shipped
    copies: bool  # rather than links
    kept: list[Path] = field(default_factory=list)

    @property
    def is_checkout(self) -> bool:
        """Whether it is the very folder that everything comes from."""
        return self.root.resolve() == self.shipped.root.resolve()

    def link_python(self, prefix: Path = Path(sys.prefix)) -> PythonProject:
        """So that `uv run` in the workspace runs the interpreter that has Trireme.

        A project of the user's stays as it is: with our link in it, its `uv sync` would change our environment. Where
        Trireme is in no virtual environment nothing can be linked, or has to be.
        """
        if not (prefix / "pyvenv.cfg").is_file():
            return "needless"
        project, venv = self.root / "pyproject.toml", self.root / ".venv"
        if project.exists() and UNMANAGED not in project.read_text():
            return "kept"
        if venv.exists():
            return "linked" if venv.resolve() == prefix.resolve() else "kept"
        venv.unlink(missing_ok=True)  # a link to what is gone
        project.write_text(PROJECT.replace("@NAME@", _plain(self.root.resolve().name)))
        venv.symlink_to(prefix.resolve())
        return "linked"

    def bring_environments(self) -> int:
        """Copied out of an installed package, which is no place to change code or to write results in."""
        packages = self.shipped.packages()
        for package in packages:
            self._bring(package, copies=self.copies or not self.shipped.is_checkout)
        self._write(Path("environments/AGENTS.md"), (self.shipped.environments / "AGENTS.md").read_text())
        return len(packages)

    def bring_models(self) -> int:
        models = self.shipped.tiny_models()
        for model in models:
            self._bring(model, copies=self.copies)
        return len(models)

    def write_endpoints(self) -> Path:
        file = Path("configs/endpoints.py")
        self._write(file, (self.shipped.root / file).read_text())
        return file

    def write_examples(self, patterns: tuple[str, ...], size: Size) -> dict[str, int]:
        """Returns how many there are of each pattern."""
        return {pattern: self._write_each(self.shipped.examples(pattern), size) for pattern in patterns}

    def _write_each(self, files: list[Path], size: Size) -> int:
        for file in files:
            self._write(file, sized((self.shipped.root / file).read_text(), size))
        return len(files)

    def _bring(self, folder: Path, *, copies: bool) -> None:
        target = self.root / folder.relative_to(self.shipped.root)
        if target.is_symlink() and not target.exists():
            target.unlink()
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if copies:
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
        else:
            target.symlink_to(folder.resolve(), target_is_directory=True)

    def _write(self, file: Path, text: str) -> None:
        target = self.root / file
        if target.exists():
            self.kept += [file] if target.read_text() != text else []
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def _plain(name: str) -> str:
    """A name that a project may have."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name).split()).lower() or "workspace"
