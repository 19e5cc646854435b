"""`trireme lab setup`: a folder to work in, with example configurations for a machine, environments and tiny models.

No file of the user's is overwritten. What is large or shared is a link to where Trireme has it, so there is one copy on
disk, and one virtual environment per environment, however many workspaces there are.
"""

from __future__ import annotations

import re
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from trireme.base.devices import Devices, detect_devices
from trireme.base.errors import ConfigError
from trireme.config.arguments import choose_verb

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


ENDPOINTS = Path("configs/endpoints.py")
PYTHON_WORDS: dict[PythonProject, tuple[str, str]] = {
    "linked": ("Created Python project", "`uv run` uses the installation of Trireme that this is, by the link .venv"),
    "kept": (
        "Kept the Python project that was here",
        f"`uv run` uses that. Trireme is in {sys.prefix}: activate it, or install Trireme into the project",
    ),
    "needless": ("Needed no Python project", "Trireme is in no virtual environment, so its commands are on PATH"),
}
SIZE_WORDS: dict[Size, str] = {"cpu": "a CPU", "one-gpu": "one GPU", "eight-gpus": "eight GPUs"}

EXAMPLES = {
    "hosted": (("rl/*.toml", "gepa/*.toml", "*/rl.toml"), "uv run rl @ configs/reverse-text/rl.toml"),
    "vf-rl": (("vf-rl/*.toml",), "uv run vf-rl @ configs/vf-rl/reverse-text.toml"),
    "prime-rl": (("prime-rl/*.toml", "*/rl.toml"), "uv run prime-rl @ configs/prime-rl/reverse-text.toml"),
}
"""The files below `configs` of each kind of examples, and the first command to type."""


def command(argv: list[str]) -> int:
    """Run `trireme lab setup`. Raises: ConfigError if the verb is unknown, or the folder cannot be written."""
    choose_verb("trireme lab", {"setup": "makes a folder to work in"}, argv)
    parser = ArgumentParser(
        prog="trireme lab setup",
        description="Makes a folder to work in: example configurations, environments, tiny models, endpoints. "
        "Overwrites nothing; the same command again adds what is missing.",
        allow_abbrev=False,
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--vf-rl", action="store_true", help="configs/vf-rl, for `vf-rl @ FILE`")
    files = "configs/prime-rl, for `prime-rl @ FILE`, and configs/*/rl.toml, for `rl @ FILE`"
    add("--prime-rl", action="store_true", help=files)
    add = parser.add_argument
    add("--size", choices=SIZES, help="the machine that the examples are for; default: this one")
    add("--path", metavar="DIR", type=Path, default=Path(), help="the folder; default: this one")

    typed = parser.parse_args(argv[1:])
    patterns, first_command = EXAMPLES["vf-rl" if typed.vf_rl else "prime-rl" if typed.prime_rl else "hosted"]
    workspace = Workspace(typed.path, find_shipped())
    size = typed.size or size_of(detect_devices())

    # Never write examples into the checkout that they are copied from.
    if workspace.root.resolve() == workspace.shipped.resolve():
        _print_done("Nothing to do", "this is the checkout itself; configs, environments and models are here")
        if size != "cpu":
            print(
                f"Its configs are for a CPU, with the values for GPUs behind `#|`. For {SIZE_WORDS[size]}, set up a "
                f"folder of its own: trireme lab setup --path ../lab --size {size}"
            )
        return 0

    # Each step keeps files that are there, so that the same command again adds only what is missing.
    try:
        workspace.root.mkdir(parents=True, exist_ok=True)
        _print_done(*PYTHON_WORDS[workspace.link_python()])
        environments, models = workspace.bring_environments(), workspace.bring_models()
        counts = f"configs, environments ({environments} packages), models ({models} tiny ones)"
        _print_done("Created workspace structure", counts)
        workspace.bring_file(ENDPOINTS)
        _print_done("Wrote endpoints", f"{ENDPOINTS}, for `trireme eval` and `trireme gepa`")
        written = workspace.write_examples(patterns, size)
    except OSError as error:
        raise ConfigError(
            f"{typed.path} cannot be set up: {error}. Expected a folder that can be written. Name another by `--path`."
        ) from error

    files = ", ".join(f"configs/{pattern} ({count})" for pattern, count in written.items() if count)
    _print_done(f"Wrote example configs for {SIZE_WORDS[size]}", files)
    for file in workspace.kept:
        print(f"  kept {file}, which was here and differs; remove it to have the example")
    cd = "" if workspace.root == Path() else f" cd {workspace.root} &&"
    print(f"\nNext:{cd} {first_command}")
    return 0


def _print_done(what: str, details: str) -> None:
    print(f"✓ {what}: {details}")


def find_shipped(package: Path | None = None) -> Path:
    """Find the folder with the examples of Trireme, its configurations, environments and tiny models: the checkout
    around our modules, or the data inside the installed package.

    Args:
        package: the folder of our modules, if it is not this one's.

    Raises: ConfigError if there is neither.
    """
    package = package or Path(__file__).parents[1]
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
