"""Whole orchestrators with a fake engine and a fake trainer: the audit finds nothing, during and after."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.versions import Versions
from trireme.launch.resume import rewind
from trireme.monitor.metrics import MetricsFile
from trireme.tools.audit.audit import audit_run
from trireme.tools.audit.report import Report
from whole_run import build_config, run

STORMY = """
    calls = 0

    def dataset(size=40):
        return [{"prompt": f"say {i}", "answer": str(i)} for i in range(size)]

    def reward(completion, answer):
        global calls
        calls += 1
        if calls % 10 == 0:
            raise ZeroDivisionError(f"call {calls}")
        score = (len(completion) * 7 + ord(completion[0])) % 10 // 4
        return {"reward": score, "length": len(completion)}
"""


def stormy_config(folder: Path) -> RunConfig:
    """Rewards that raise, groups without signal, engines that refuse: two environments, one with few examples."""
    orchestrator = {
        "buffer": {"online_difficulty_filtering": True},
        "max_off_policy_steps": 2,
        "max_rollout_attempts": 2,
        "oversampling_factor": 2.0,
    }
    config = build_config(folder, STORMY, max_async_level=2, max_steps=8, orchestrator=orchestrator)
    second = Path(shutil.copy(folder / "toy.py", folder / "second.py"))
    first = config.orchestrator.env[0]
    other = first.model_copy(update={"id": str(second), "name": "few", "weight": 0.5, "args": {"size": 3}})
    orchestrated = config.orchestrator.model_copy(update={"env": (first, other)})
    return config.model_copy(update={"orchestrator": orchestrated})


async def slow_now_and_then(asked):
    await asyncio.sleep(0.1 if asked.number % 17 == 0 else 0.0)


def refuse_now_and_then(asked):
    return 400 if asked.number % 19 == 0 else None


STORM = {"delay": slow_now_and_then, "refuse": refuse_now_and_then}


def writing_lines(config: RunConfig) -> dict[str, Any]:
    """Build the knobs of a trainer that writes a line of the step before, as the real one does."""
    lines = MetricsFile(config.paths.metrics, process="trainer")

    def before_step(version: int) -> None:
        if version:
            lines.append(version - 1, {"loss": 0.1})

    return {"before_step": before_step}


def assert_holds(config: RunConfig) -> Report:
    report = audit_run(config.paths.root)
    assert report.holds, report.text(everything=True)
    return report


def audited(config: RunConfig, *, until: int, engine: dict[str, Any], version: int = 0) -> None:
    """Run up to a version, and audit the run again and again meanwhile."""
    count = 0

    async def look(running):
        nonlocal count
        while running.orchestrator.policy.version < until and not running.trainer.stop.is_set():
            await asyncio.to_thread(assert_holds, config)
            count += 1
            await asyncio.sleep(0.01)

    trainer = writing_lines(config) | {"version": version, "until": until}
    outcome = run(config, engine=engine, trainer=trainer, meanwhile=look, stop_after_meanwhile=until < config.max_steps)
    assert count > 1
    assert outcome.error is None


def test_a_stormy_run_that_is_stopped_resumed_and_rewound_holds_at_every_moment(tmp_path):
    config = stormy_config(tmp_path)
    write_run(config, config.paths.run_config)
    audited(config, until=3, engine=dict(STORM))
    assert 3 <= assert_holds(config).summary.batches < 8
    resumed = config.model_copy(update={"resume": True})
    audited(resumed, until=8, engine=dict(STORM), version=Versions(config.paths.journal).newest)
    summary = assert_holds(config).summary
    assert (summary.batches, summary.trained, summary.versions_confirmed) == (8, 64, 9)
    assert len(summary.dropped_for) > 1
    before = Journal(config.paths.journal).path(5).read_bytes()
    rewind(config.paths, 3)
    assert assert_holds(config).summary.batches == 3
    audited(resumed, until=8, engine={"delay": slow_now_and_then}, version=3)
    summary = assert_holds(config).summary
    assert summary.batches == 8
    assert Journal(config.paths.journal).path(5).read_bytes() != before
    assert summary.set_aside
