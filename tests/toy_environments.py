"""Environments of a few lines, each in one file, run by real workers."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask

PACKAGES = Path(__file__).parent / "environments"
ECHO = """
    def dataset(size=20):
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(size)]

    def reward(completion, answer):
        return float(completion == answer)
"""


def write(folder: Path, code: str, name: str = "toy.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return str(path)


def says(text: str) -> Callable[[Ask], Awaitable[Reply]]:
    async def ask(question: Ask) -> Reply:
        return Reply(content=text, finish_reason="stop", prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])

    return ask


def with_environment(
    folder: Path, id: str, use: Callable[[Environment], Awaitable[Any]], *, load_timeout_s: float = 60, **config: Any
) -> Any:
    """Opens the environment, runs `use` on it, and closes it, in an event loop of its own."""

    async def main() -> Any:
        settings = EnvironmentConfig(id=id, **config)
        async with open_environment(settings, logs=folder / "logs", load_timeout_s=load_timeout_s) as environment:
            return await asyncio.wait_for(use(environment), 60)

    return asyncio.run(main())


def with_package(folder: Path, package: str, use: Callable[[Environment], Awaitable[Any]], /, **args: Any) -> Any:
    """As `with_environment`, for a package of `tests/environments`, which uv installs in `folder` where it is not."""

    async def main() -> Any:
        async with open_package(folder, package, **args) as environment:
            return await asyncio.wait_for(use(environment), 60)

    return asyncio.run(main())


def open_package(folder: Path, package: str, /, **args: Any) -> AbstractAsyncContextManager[Environment]:
    settings = EnvironmentConfig(id=package, args=args)
    return open_environment(settings, logs=folder / "logs", root=PACKAGES, cache=folder / "cache", load_timeout_s=300)


async def run_all(environment: Environment, ask: Callable[[Ask], Awaitable[Reply]], count: int) -> list[Any]:
    tasks = [environment.run(RunTask(task=f"r{i}", index=i), ask) for i in range(count)]
    return await asyncio.gather(*tasks, return_exceptions=True)


async def run_group(environment: Environment, contents: list[str], *, index: int = 0, name: str = "g") -> list[Any]:
    """One rollout for each of the answers, as a group."""
    size = len(contents)
    tasks = [RunTask(task=f"{name}-{i}", index=index, group=name, group_size=size) for i in range(size)]
    rollouts = [environment.run(task, says(content)) for task, content in zip(tasks, contents, strict=True)]
    return await asyncio.gather(*rollouts, return_exceptions=True)
