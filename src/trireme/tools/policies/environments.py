"""Install and load the environments that a command makes rollouts in, and show how long that may take."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.venv import (
    BUILD_TIMEOUT_S,
    EnvironmentSource,
    environment_python,
    find_environment,
    installed_venv,
)
from trireme.orchestrator.environments.worker_process import LOAD_TIMEOUT_S
from trireme.tools import progress


def install(source: EnvironmentSource, *, again: bool = False) -> float:
    """Install an environment in a virtual environment of its own, and return the seconds that it took."""
    began = time.monotonic()
    with progress.stage(f"installing {Path(source.id).name}", limit_s=BUILD_TIMEOUT_S):
        environment_python(source, again=again)
    return time.monotonic() - began


def install_missing(configs: Iterable[EnvironmentConfig]) -> None:
    """Install the environments that have yet to be.

    Commands do so before they start an event loop, in which it would delay Ctrl-C.
    """
    for source in (find_environment(config.id) for config in configs):
        if source.folder is not None and installed_venv(source) is None:
            install(source)


@asynccontextmanager
async def open_environments(
    configs: Iterable[EnvironmentConfig], logs: Path, waits: Waits, *, seed: int
) -> AsyncIterator[list[Environment]]:
    """Load environments one after the other. Raises: ConfigError if one cannot be loaded."""
    async with AsyncExitStack() as stack:
        environments = []
        for config in configs:
            opening = open_environment(config, logs=logs, seed=seed, waits=waits, shows_pictures=True)
            with progress.stage(f"loading {config.resolved_name}", limit_s=LOAD_TIMEOUT_S):
                environments.append(await stack.enter_async_context(opening))
        yield environments
