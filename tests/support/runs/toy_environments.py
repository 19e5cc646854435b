"""Environments of a few lines, each in one file, run by real workers."""

import asyncio
import importlib
import itertools
import os
import sys
import tempfile
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from support.processes.warm_python import warm_workers
from support.runs.local_packages import write_package
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.session.session import Session
from trireme.orchestrator.session.wire import Ask, Reply, RunTask

PACKAGES, SHIPPED = Path(__file__).parents[2] / "environments", Path(__file__).parents[3] / "environments"
SHIPPED_OF_V0 = ("alphabet_sort", "gsm8k", "math_python", "reverse_text", "wiki_search", "wordle")
GROUP_NUMBERS = itertools.count()
Use = Callable[[Environment], Awaitable[Any]]
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


def in_turn(*replies: Reply) -> Callable[[Ask], Awaitable[Reply]]:
    left = iter(replies)

    async def ask(question: Ask) -> Reply:
        return next(left)

    return ask


def refuses(error: str, kind: Any = "engine") -> Callable[[Ask], Awaitable[Reply]]:
    async def ask(question: Ask) -> Reply:
        return Reply(error=error, error_kind=kind)

    return ask


def fills_up(ask: Callable[[Ask], Awaitable[Reply]]) -> Callable[[Ask], Awaitable[Reply]]:
    """The first turn is that of `ask`; then the conversation no longer fits."""
    full = refuses("530 tokens, the model takes 512", "overlong_prompt")
    return lambda question: (full if len(question.messages) > 1 else ask)(question)


def noting(ask: Callable[[Ask], Awaitable[Reply]]) -> tuple[Callable[[Ask], Awaitable[Reply]], list[Ask]]:
    """What answers as `ask` does, and all that it was asked."""
    questions: list[Ask] = []

    async def note(question: Ask) -> Reply:
        questions.append(question)
        return await ask(question)

    return note, questions


async def never(question: Ask) -> Any:
    await asyncio.sleep(60)


@contextmanager
def running(opening: AbstractAsyncContextManager[Environment]) -> Iterator[Callable[[Use], Any]]:
    """Opens an environment in an event loop of its own, and yields what runs a coroutine function on it there."""
    with asyncio.Runner() as runner:
        environment = runner.run(opening.__aenter__())  # type: ignore[arg-type]
        try:
            yield lambda use: runner.run(asyncio.wait_for(use(environment), 60))
        finally:
            runner.run(opening.__aexit__(None, None, None))  # type: ignore[arg-type]


@contextmanager
def sharing(open_one: Callable[..., AbstractAsyncContextManager[Environment]]) -> Iterator[Callable[..., Any]]:
    """Yields what opens an environment and runs `use` on it. The last one stays open for the next test of the same."""
    last: Any = None
    with ExitStack() as stack:

        def run_on(which: str, use: Use, /, **config: Any) -> Any:
            nonlocal last
            if last is None or last[0] != (which, config):
                last = stack.close()
                last = (which, config), stack.enter_context(running(open_one(which, **config)))
            return last[1](use)

        yield run_on


@contextmanager
def shared_toys(folder: Path) -> Iterator[Callable[..., Any]]:
    """As `sharing`; `which` is the code of a toy environment."""
    numbers = itertools.count()

    def open_one(code: str, /, **config: Any) -> AbstractAsyncContextManager[Environment]:
        return open_toy(folder, write(folder, code, f"toy{next(numbers)}.py"), **config)

    with sharing(open_one) as run_on:
        yield run_on


def open_toy(folder: Path, id: str, *, load_timeout_s=60.0, **config: Any) -> AbstractAsyncContextManager[Environment]:
    settings = EnvironmentConfig(id=id, **config)
    return open_environment(settings, logs=folder / "logs", load_timeout_s=load_timeout_s)


def with_environment(folder: Path, id: str, use: Use, **config: Any) -> Any:
    with running(open_toy(folder, id, **config)) as run:
        return run(use)


def open_package(folder: Path, package: str, /, **args: Any) -> AbstractAsyncContextManager[Environment]:
    """A package of `tests/environments`, or one that is shipped. Those of verifiers v0 share a virtual environment."""
    if not package.startswith("v1-"):
        _write_v0_packages(folder)
        package, root, args = "v0-packages", folder, {"package": package.replace("-", "_")} | args
    else:
        root = PACKAGES
    settings = EnvironmentConfig(id=package, name=args.get("package"), args=args)
    return open_environment(settings, logs=folder / "logs", root=root, cache=folder / "cache", load_timeout_s=300)


def _write_v0_packages(folder: Path) -> None:
    """One that needs them all, and loads the one that is named."""
    if (folder / "v0_packages").exists():
        return
    code = "import importlib\n\n\ndef load_environment(package, **args):\n"
    code += "    return importlib.import_module(package).load_environment(**args)\n"
    places = [PACKAGES / "trireme_toys", *(SHIPPED / name for name in SHIPPED_OF_V0)]
    sources = {place.name.replace("_", "-"): f'{{ path = "{place}", editable = true }}' for place in places}
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own, suppress(OSError):  # raised where another process was first
        write_package(Path(own), "v0-packages", code, sources=sources).rename(folder / "v0_packages")


@contextmanager
def shared_packages(tmp_path_factory: Any) -> Iterator[Callable[..., Any]]:
    """As `sharing`; `which` is a package."""
    folder = packages_folder(tmp_path_factory)
    with warm_workers(), sharing(lambda package, **args: open_package(folder, package, **args)) as run_on:
        yield run_on


def packages_folder(tmp_path_factory: Any) -> Path:
    """For `open_package`: one for all processes of the test session, so that uv makes each environment once."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "packages"


def import_shipped(package: str, module: str) -> ModuleType:
    sys.path.append(str(SHIPPED / package))
    return importlib.import_module(module)


async def run_all(environment: Environment, ask: Callable[[Ask], Awaitable[Reply]], count: int) -> list[Any]:
    tasks = [environment.run(Session(RunTask(task=f"r{i}", index=i), ask)) for i in range(count)]
    return await asyncio.gather(*tasks, return_exceptions=True)


async def run_one(environment: Environment, ask: Callable[[Ask], Awaitable[Reply]], index: int = 0, **task: Any) -> Any:
    return await environment.run(Session(RunTask(**{"task": "r", "index": index} | task), ask))


def talk(*said: str) -> list[dict]:
    """Messages of a user and the model by turns."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]


async def asked_and_done(environment: Environment, index: int = 0) -> tuple[list[dict], Any]:
    """The messages of a rollout's last turn, and its result."""
    ask, asked = noting(says("red"))
    done = await run_one(environment, ask, index, task=f"r{index}")
    return asked[-1].messages, done


async def run_group(environment: Environment, contents: list[str], *, index: int = 0, name: str = "") -> list[Any]:
    """One rollout for each of the answers, as a group. Without a name it gets one that no other has."""
    size, name = len(contents), name or f"group{next(GROUP_NUMBERS)}"
    tasks = [RunTask(task=f"{name}-{i}", index=index, group=name, group_size=size) for i in range(size)]
    rollouts = [environment.run(Session(task, says(content))) for task, content in zip(tasks, contents, strict=True)]
    return await asyncio.gather(*rollouts, return_exceptions=True)
