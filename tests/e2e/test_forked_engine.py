"""vLLM on a CPU as we start it: one import, one fork, and no part of it without the other."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from real_run import SharedEngine, open_engine, wait_until

pytestmark = pytest.mark.e2e

PROMPT = list(range(5, 25))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[SharedEngine]:
    with open_engine(tmp_path) as engine:
        yield engine


def core_of(engine: SharedEngine) -> psutil.Process:
    """The engine's process; the server's is the one that was started."""
    engine.process.poll()
    alive = [process for process in engine.process.family if process.is_running()]
    return next(process for process in alive if "EngineCore" in " ".join(process.cmdline()))


def said(engine: SharedEngine) -> tuple[list[int], list[float]]:
    """Tokens and their logprobs, with threads of OpenMP at work where there are several cores."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 12, "temperature": 0.0, "logprobs": 0}}
    answer = httpx.post(
        f"http://127.0.0.1:{engine.port}/inference/v1/generate", json=body, timeout=60, trust_env=False
    ).json()
    choice = answer["choices"][0]
    return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def test_a_server_that_is_killed_takes_its_engine_along_and_leaves_its_port(opened: SharedEngine) -> None:
    assert said(opened) == said(opened)
    core = core_of(opened)
    assert not core.children()  # the worker is a part of it
    held = {connection.laddr.port for connection in core.net_connections("tcp") if connection.status == "LISTEN"}
    assert opened.port not in held
    opened.process.kill()
    wait_until(lambda: not psutil.pid_exists(core.pid), "the engine to end with its server", [opened.process])


def test_a_server_whose_engine_ends_ends_too_though_no_signal_was_meant_for_it(
    opened: SharedEngine,
) -> None:
    core_of(opened).send_signal(signal.SIGTERM)
    opened.process.wait()
    assert "engine core exited unexpectedly" in opened.process.output
    assert "shutdown triggered" not in opened.process.output  # as it says of a signal that reached it
