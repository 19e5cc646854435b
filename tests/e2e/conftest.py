"""One engine for all runs that are started process by process, and one run that several tests compare theirs with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.runs.real_run import Run, SharedEngine, open_engine, run_apart

ENGINES = {"engine": "shared engine", "lora_engine": "LoRA engine", "moe_engine": "MoE engine", "stopped": "quickstart"}
"""Fixtures that start vLLM. All tests that use one belong into one process of the test session."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in ENGINES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(ENGINES[name]))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """It parses thinking and tool calls, and gives the logprobs of the whole vocabulary where asked."""
    parsers = ["--inference.model.reasoning-parser", "qwen3", "--inference.model.tool-call-parser", "hermes"]
    with open_engine(tmp_path_factory.mktemp("engine"), *parsers, "--args", '{"max-logprobs": 1000}') as opened:
        yield opened


@pytest.fixture(scope="session")
def straight(engine: SharedEngine, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six synchronous steps of one rank, without a stop."""
    return run_apart(engine, tmp_path_factory.mktemp("straight") / "run")
