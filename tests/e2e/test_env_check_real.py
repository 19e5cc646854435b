"""`trireme env check` with real tokens, and environments of two versions of verifiers beside each other."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from real_run import DEADLINE_S, REPOSITORY, SharedEngine, run_command
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.environments.venv import environment_python, find_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parents[1] / "environments"


def test_the_baseline_of_the_quickstart_is_measured_on_the_way_that_training_takes(
    engine: SharedEngine, tmp_path: Path
) -> None:
    words = ["reverse-text", "-a", '{"max_length": 8}', "-n", "10", "-r", "4", "--max-tokens", "16", "--json"]
    where = ["--base-url", f"http://127.0.0.1:{engine.port}", "--output", str(tmp_path / "check")]
    report = json.loads(run_command("trireme", "env", "check", *words, *where))
    assert report["holds"]
    assert report["num_done"] == 40
    assert "by the engine at" in report["policy"]
    assert 0.1 < report["rewards"]["success"] < 0.9
    assert 1 <= report["sampled"]["least"] <= report["sampled"]["most"] <= 16
    assert report["loaded"]["versions"]["verifiers"] == "0.2.0"


def test_environments_of_two_versions_of_verifiers_run_side_by_side_offline_once_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = (str(REPOSITORY / "environments" / "reverse_text"), str(PACKAGES / "v1_echo"))
    for id in ids:
        environment_python(find_environment(id))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("UV", "/no/uv/here")

    async def ask(question: Ask) -> Reply:
        return Reply(content="word 0", finish_reason="stop", prompt_ids=[1], completion_ids=[2], logprobs=[-0.1])

    async def one(environment: Environment) -> tuple[str, str]:
        done = await environment.run(RunTask(task="t", index=0), ask)
        assert done.completion[-1]["content"] == "word 0"
        return environment.versions["verifiers"], done.task

    async def main() -> list[tuple[str, str]]:
        old, new = (open_environment(EnvironmentConfig(id=id), logs=tmp_path) for id in ids)
        async with asyncio.timeout(DEADLINE_S), old as v0, new as v1:
            return list(await asyncio.gather(one(v0), one(v1)))

    assert asyncio.run(main()) == [("0.2.0", "t"), ("0.4.0", "t")]
