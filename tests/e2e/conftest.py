"""One engine for all runs that are started process by process, and one run that several tests compare theirs with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from real_run import Run, SharedEngine, open_engine, run_apart


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    with open_engine(tmp_path_factory.mktemp("engine")) as opened:
        yield opened


@pytest.fixture(scope="session")
def straight(engine: SharedEngine, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six synchronous steps of one rank, without a stop."""
    return run_apart(engine, tmp_path_factory.mktemp("straight") / "run")
