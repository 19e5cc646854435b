"""Where a command finds an environment that it is given by name, and how it has it built."""

from __future__ import annotations

import time
from pathlib import Path

from trireme.orchestrator.environments.venv import (
    BUILD_TIMEOUT_S,
    EnvironmentSource,
    environment_python,
    find_environment,
)
from trireme.tools.environments.check_progress import CheckProgress

ROOT = Path("environments")


def find_source(name: str, root: Path) -> EnvironmentSource:
    """Raises: ConfigError. `root` may be the package's own folder too."""
    if (root / "pyproject.toml").is_file():
        return find_environment(str(root.resolve()), root=root.parent)
    return find_environment(name, root=root)


def build(source: EnvironmentSource, progress: CheckProgress, *, again: bool = False) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    with progress.stage(f"installing {source.id}", limit_s=BUILD_TIMEOUT_S):
        environment_python(source, again=again)
    return time.monotonic() - began
