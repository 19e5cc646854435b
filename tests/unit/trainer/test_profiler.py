"""Profiles of training."""

import gzip
import json
from pathlib import Path

import pytest

from support.models import tiny
from trireme.config.trainer import TrainerConfig
from trireme.trainer.parallel.mesh import World
from trireme.trainer.profiler import TRACED, open_profiler


@pytest.mark.parametrize(("steps", "traced"), [(2, 1), (TRACED + 3, TRACED)])
def test_trace_has_the_steps_after_the_first(steps, traced, tiny_model: Path, world: World, tmp_path: Path):
    state = tiny.open_state(tiny_model, world)
    with open_profiler(TrainerConfig(trace_path=tmp_path / "traces"), world) as profiler:
        for seed in range(steps):
            tiny.train_step(state, tiny.random_samples([12, 20], seed=seed), world)
            profiler.step_done(state.version)
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name == "trace_0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert "aten::mm" in names
    assert sum(name.startswith("Optimizer.step#") for name in names) == traced


def test_memory_profile_says_that_it_has_no_effect_on_a_cpu(world: World, tmp_path: Path, caplog):
    with open_profiler(TrainerConfig(memory_profiler_path=tmp_path / "memory"), world) as profiler:
        profiler.step_done(1)
    assert "has no effect here" in caplog.text
    assert not (tmp_path / "memory").exists()
