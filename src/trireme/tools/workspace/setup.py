"""Set up a workspace: a folder with example configurations for a machine, environments and tiny models.

No file of the user's is overwritten. What is large or shared is a link to where Trireme has it, so there is one copy on
disk, and one virtual environment per environment, however many workspaces there are.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from trireme.base.devices import Devices
from trireme.base.errors import ConfigError

PythonProject = Literal["linked", "kept", "needless"]

PARTS = ("configs", "environments", "models")
IN_PACKAGE = "shipped"  # folder of the parts in a wheel; `hatch_build.py` puts them there

PROJECT = """\
# `uv run` uses the installation of Trireme that .venv here is a link to.

[project]
name = "@NAME@"
version = "0.1.0"
requires-python = ">=3.11,<3.14"
dependencies = ["trireme"]

[tool.uv]
managed = false
"""
UNMANAGED = b"managed = false"  # uv reads such a project, and never installs for it

Size = Literal["cpu", "one-gpu", "eight-gpus"]
SIZES: tuple[Size, ...] = get_args(Size)

NO_KEY = "-"
_COMMENTS: dict[Size, str] = {"cpu": "# CPU: ", "one-gpu": "# One GPU: ", "eight-gpus": "# Eight GPUs: "}

_SIZED = re.compile(r"(?:# )?(?P<key>[\w.-]+) = (?P<cpu>.*?)(?: # .*?)? #\| (?P<others>.*)")
_EMPTY_TABLE = re.compile(r"\[[^\[\n]+\](?: #.*)?")  # a paragraph of which only the heading is left
_ABOUT_SIZES = "# `#|` "  # begins the line of a file's head that explains the notation


def find_shipped(package: Path | None = None) -> Path:
    """Find the folder with the examples of Trireme, its configurations, environments and tiny models: the checkout
    around our modules, or the data inside the installed package.

    Args:
        package: the folder of our modules, if it is not this one's.

    Raises: ConfigError if there is neither.
    """
    package = package or Path(__file__).parents[2]
    places = (package.parents[1], package / IN_PACKAGE)
    for place in places:
        if all((place / part).is_dir() for part in PARTS):
            return place
    raise ConfigError(
        f"The examples of Trireme are in none of {', '.join(map(str, places))}. Expected "
        f"{', '.join(PARTS)} in a checkout, or in the installed package. Install it again, from a whole checkout."
    )


@dataclass
class Workspace:
    """A folder that is being set up.

    Example:
        workspace = Workspace(Path("lab"), find_shipped())
        workspace.write_examples(["vf-rl/*.toml"], "cpu")
        workspace.kept  # [Path("configs/vf-rl/wordle.toml")]: the file was there and differs
    """

    root: Path
    shipped: Path  # see `find_shipped`
    kept: list[Path] = field(default_factory=list)

    def link_python(self, prefix: Path = Path(sys.prefix)) -> PythonProject:
        """Make `uv run` in the workspace use the interpreter that has Trireme.

        A project of the user's stays as it is: with our link in it, its `uv sync` would change our environment. If
        Trireme is in no virtual environment, its commands are on PATH and no link is needed.
        """
        if not (prefix / "pyvenv.cfg").is_file():
            return "needless"

        project, venv = self.root / "pyproject.toml", self.root / ".venv"
        if project.exists() and UNMANAGED not in project.read_bytes():
            return "kept"
        if venv.exists():
            return "linked" if venv.resolve() == prefix.resolve() else "kept"
        venv.unlink(missing_ok=True)  # a link to a folder that is gone

        # uv uses the environment that `.venv` links to, and the project keeps it from installing into that.
        name = re.sub(r"[\W_]+", "-", self.root.resolve().name).strip("-").lower() or "workspace"
        project.write_text(PROJECT.replace("@NAME@", name))
        venv.symlink_to(prefix.resolve())
        return "linked"

    def bring_environments(self) -> int:
        """Link the environments; copy them from an installed package, where users should not edit code or find results.

        Returns: their number.
        """
        # A checkout has a pyproject.toml at this place, an installed package has none.
        copies = not (self.shipped / "pyproject.toml").is_file()
        self.bring_file(Path("environments/AGENTS.md"))
        self._bring("environments/examples/*.py", copies=copies)
        return self._bring("environments/*/pyproject.toml", copies=copies)

    def bring_models(self) -> int:
        """Link the tiny models, and return their number."""
        return self._bring("models/*/config.json", copies=False)

    def bring_file(self, file: Path) -> None:
        self._write(file, (self.shipped / file).read_text())

    def write_examples(self, patterns: Sequence[str], size: Size) -> dict[str, int]:
        """Write the example configurations, and return how many there are of each pattern."""
        counts = dict.fromkeys(patterns, 0)
        for pattern in patterns:
            for file in sorted(self.shipped.glob(f"configs/{pattern}")):
                self._write(file.relative_to(self.shipped), sized(file.read_text(), size))
                counts[pattern] += 1
        return counts

    def _bring(self, pattern: str, *, copies: bool) -> int:
        """Link or copy the folders of the files that match."""
        folders = {file.parent for file in self.shipped.glob(pattern)}
        for folder in folders:
            target = self.root / folder.relative_to(self.shipped)
            if target.is_symlink() and not target.exists():
                target.unlink()  # a link to a folder that is gone

            # What is there may be the user's work.
            if target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if copies:
                shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__", "outputs"))
            else:
                target.symlink_to(folder.resolve(), target_is_directory=True)
        return len(folders)

    def _write(self, file: Path, text: str) -> None:
        target = self.root / file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        elif target.read_bytes() != text.encode():
            self.kept.append(file)


def size_of(devices: Devices) -> Size:
    """Return the size of the examples that this machine can run."""
    return "cpu" if not devices.gpus else "one-gpu" if devices.num_gpus < 8 else "eight-gpus"


def sized(text: str, size: Size) -> str:
    """Return the file for one size, without the values of the others."""
    others = (_ABOUT_SIZES, *(comment for other, comment in _COMMENTS.items() if other != size))
    lines = []
    for line in text.splitlines():
        found = _SIZED.fullmatch(line)
        if line.startswith(others):
            continue
        if found is None:
            lines.append(line)
        elif size == "cpu":
            lines += [] if found["cpu"] == NO_KEY else [line[: line.index(" #| ")]]
        else:
            # After `#|` are the values of all sizes but the first, in the order of `SIZES`.
            values = found["others"].split(" | ")
            assert len(values) == len(SIZES) - 1, f"{line!r} has {len(values)} values after `#|`, expected 2"
            value = values[SIZES.index(size) - 1].strip()
            lines += [] if value == NO_KEY else [f"{found['key']} = {value}"]

    # A table whose keys are all for other sizes is left with its heading alone, and would set something.
    paragraphs = "\n".join(lines).strip().split("\n\n")
    meant = {*text.split("\n\n")}  # a table may be empty in the file too
    return "\n\n".join(each for each in paragraphs if each in meant or not _EMPTY_TABLE.fullmatch(each)) + "\n"
