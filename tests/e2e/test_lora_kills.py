"""Adapters alone, sent by real processes: the run is the one in which nobody dies, whoever dies."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_run import Run
from scripted_kills import KilledRun, audit, first_other_version, open_run

pytestmark = pytest.mark.e2e

STEPS = 12
LORA = ("--trainer.model.lora.rank", "4", "--trainer.model.lora.sync", "adapter", "--trainer.optim.lr", "1e-3")
QUICKLY = ("--supervisor.backoff-s", "0.2", "--weight-broadcast.timeout-s", "60")
KILLS = (
    ("engine core", "engine.receiving"),
    ("trainer rank 0", "trainer.sending"),
    ("engine core", "engine.finished"),
    ("orchestrator", "version.before_record"),
)
END_S = 240.0


def lora_run(folder: Path, tiny_model: Path) -> KilledRun:
    """Beside a scripted engine, which samples what the digests of its weights and its adapters say."""
    flags = ["--max-steps", str(STEPS), "--model.name", str(tiny_model), *LORA, *QUICKLY]
    return KilledRun(folder, flags, name="lora")


@pytest.fixture(scope="module")
def whole(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = lora_run(tmp_path_factory.mktemp("whole"), tiny_model)
    with open_run(run):
        run.start()
        run.wait(END_S)
    return run.run


def test_whoever_is_killed_the_adapters_become_the_same(whole: Run, tiny_model: Path, tmp_path: Path) -> None:
    """An engine that starts anew is given the base model again before its adapters."""
    run = lora_run(tmp_path, tiny_model)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 1, "version 1")
        for victim, point in KILLS:
            run.kill_at(victim, point)
        run.wait(END_S)
    print("\n".join(run.story))
    other = first_other_version(run.run, whole)
    assert other is None, f"{other}\n{run.tell()}"
    assert adapters(run.run) == adapters(whole)
    found = audit(run.run)
    assert found.returncode == 0, f"{found.stdout}{found.stderr}"


def adapters(run: Run) -> bytes:
    return run.weights(STEPS).with_name("adapter_model.safetensors").read_bytes()
