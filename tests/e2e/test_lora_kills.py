"""Adapters alone, sent by real processes: a run whose processes are killed ends like one without kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripted_kills import KilledRun, assert_same_weights, finish_undisturbed, open_run

pytestmark = pytest.mark.slow

STEPS = 12
LORA = ("--trainer.model.lora.rank", "4", "--trainer.model.lora.sync", "adapter", "--trainer.optim.lr", "1e-3")
QUICKLY = ("--supervisor.backoff-s", "0.2", "--weight-broadcast.timeout-s", "60")
KILLS = (
    ("engine core", "engine.receiving"),
    ("trainer rank 0", "trainer.sending"),
    ("engine core", "engine.finished"),
    ("orchestrator", "version.before_record"),
)


def lora_run(folder: Path, tiny_model: Path) -> KilledRun:
    """Beside a scripted engine, which samples what the digests of its weights and its adapters say."""
    flags = ["--max-steps", str(STEPS), "--model.name", str(tiny_model), *LORA, *QUICKLY]
    return KilledRun(folder, flags, name="lora")


def test_whichever_process_is_killed_the_adapters_become_the_same(tiny_model: Path, tmp_path: Path) -> None:
    """A restarted engine is given the base model again before its adapters."""
    whole = finish_undisturbed(lora_run(tmp_path / "whole", tiny_model))
    run = lora_run(tmp_path / "killed", tiny_model)
    with open_run(run):
        run.start()
        run.until(lambda: run.version >= 1, "version 1")
        for victim, point in KILLS:
            run.kill_at(victim, point)
        run.wait()
    assert_same_weights(run, whole, STEPS, "adapter_model.safetensors")
