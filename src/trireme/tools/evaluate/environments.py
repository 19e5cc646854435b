"""The environments of an evaluation: found and installed before anything is asked, loaded side by side."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trireme.base.errors import ConfigError
from trireme.base.network import is_loopback
from trireme.base.paths import RunPaths
from trireme.base.token import TOKEN
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.resolve import updated
from trireme.launch.folder import hold_folder
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.venv import installed_venv
from trireme.tools.environments.catalog import ROOT, build, find_source
from trireme.tools.environments.check import LOAD_TIMEOUT_S
from trireme.tools.environments.progress import Progress
from trireme.tools.evaluate.endpoints import key_for_address
from trireme.tools.evaluate.eval_config import EvalConfig


def found(environments: tuple[EnvironmentConfig, ...], *, max_concurrent: int) -> tuple[EnvironmentConfig, ...]:
    """Each by its folder, and with no more rollouts at once than asked for.

    Raises: ConfigError where one is not there.
    """
    return tuple(_found(each, max_concurrent) for each in environments)


def _found(environment: EnvironmentConfig, max_concurrent: int) -> EnvironmentConfig:
    source = find_source(environment.id, ROOT)
    where = {"id": str(source.folder)} if source.folder is not None else {}
    return updated(environment, where | {"max_concurrent": min(environment.max_concurrent, max_concurrent)})


def install(environments: tuple[EnvironmentConfig, ...], progress: Progress) -> None:
    for each in environments:
        source = find_source(each.id, ROOT)
        if source.folder is not None and installed_venv(source) is None:
            build(source, progress)


@dataclass(frozen=True)
class Loading:
    """What environments are loaded with."""

    logs: Path
    seed: int
    waits: Waits
    progress: Progress

    @asynccontextmanager
    async def open(self, environments: tuple[EnvironmentConfig, ...]) -> AsyncIterator[list[Environment]]:
        """Raises: ConfigError where one cannot be loaded."""
        async with AsyncExitStack() as stack:
            yield [await self._open(each, stack) for each in environments]

    async def _open(self, environment: EnvironmentConfig, stack: AsyncExitStack) -> Environment:
        with self.progress.stage(f"loading {environment.name}", limit_s=LOAD_TIMEOUT_S):
            opening = open_environment(environment, logs=self.logs, seed=self.seed, waits=self.waits)
            return await stack.enter_async_context(opening)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Raises: ConfigError where another evaluation writes into it."""
    holding = hold_folder(RunPaths(folder))
    try:
        holding.__enter__()
    except ConfigError as error:
        raise ConfigError(
            f"another evaluation writes into {folder} ({str(error).partition(' - ')[0]}) - expected one at a time. "
            "Wait for it, or name another folder: `--output-dir`."
        ) from None
    try:
        yield
    finally:
        holding.__exit__(None, None, None)


def key_of(config: EvalConfig) -> str | None:
    """Raises: ConfigError where a variable is named, and is not set."""
    name = config.client.api_key_var
    if name and not os.environ.get(name):
        raise ConfigError(
            f"client.api_key_var = {name!r}: this variable is not set - expected the server's key in it. Type `export "
            f"{name}=…`, or leave it out."
        )
    is_near = is_loopback(urlsplit(config.client.base_url).hostname or "")
    if name:
        return os.environ[name]
    ours = os.environ.get(TOKEN) if is_near or config.weights_dir else None
    return ours or key_for_address(config.client.base_url)
