"""Fixtures that many tests share. Heavy imports stay inside: most tests need no torch."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# The same examples each time, however slow the machine, and nothing written down beside the tests.
settings.register_profile("trireme", max_examples=60, deadline=None, derandomize=True, database=None)
settings.load_profile("trireme")

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing waits for a hub, here and in processes that tests start

if TYPE_CHECKING:
    from support.processes.stage import Stage
    from trireme.trainer.parallel.mesh import World


@pytest.fixture(autouse=True)
def _logs_are_seen() -> None:
    """Commands that run in the test's own process start logging to standard output, where `caplog` sees nothing."""
    logger = logging.getLogger("trireme")
    logger.handlers[:] = []
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(autouse=True)
def _pipes_raise() -> None:
    """A command that ran in the test's own process with `--help` made a broken pipe end the process."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rl` in the test's own process makes a token, which must not reach the engines of later tests."""
    monkeypatch.setenv("TRIREME_TOKEN", "")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer model and a tokenizer of single characters."""
    from support.models.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Runs a function on an environment of a package; see `toy_environments.py`."""
    from support.runs.toy_environments import shared_packages

    with shared_packages(tmp_path_factory) as run_on:
        yield run_on


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """This process as the only trainer rank."""
    from trireme.trainer.parallel.mesh import open_world

    with open_world("cpu", threads=1, timeout_s=60) as opened:
        yield opened


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """A run whose processes are small scripts. None of them outlives the test."""
    from support.processes.stage import Stage

    stage = Stage(tmp_path)
    yield stage
    for pid in stage.alive():
        os.kill(pid, signal.SIGKILL)
