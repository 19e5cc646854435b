"""Checkpoints are written while training continues, and survive kills and full disks."""

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.models.tiny import are_equal, content_of, open_exporter, open_state, open_store, save_run, train_until
from support.processes.limits import file_size_limit, fill, small_disk
from support.processes.rank_processes import run_rank, run_ranks
from support.processes.stage import until
from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import Waits
from trireme.config.trainer import Checkpoints
from trireme.journal.manifest import complete_steps
from trireme.trainer.checkpoint.checkpoint import CheckpointStore, load_checkpoint
from trireme.trainer.parallel.mesh import World


def test_training_on_does_not_change_what_is_written(tmp_path, tiny_model, world, monkeypatch):
    monkeypatch.setenv("TRIREME_FAULTS", f"folder={tmp_path}")
    (tmp_path / "checkpoint.begun").write_text("hold")
    state = train_until(open_state(tiny_model, world), world, until=1)
    expected = content_of(state)
    store = open_store(tmp_path / "c", world, exporter=open_exporter(tmp_path / "w", tiny_model, state.model, world))
    store.save(state)
    train_until(state, world, until=3)
    torch.manual_seed(1)
    assert complete_steps(tmp_path / "c") == []
    (tmp_path / "checkpoint.begun.go").touch()
    store.wait()
    resumed = open_state(tiny_model, world)
    open_store(tmp_path / "c", world).resume(resumed, resume=True)
    assert resumed.version == 1
    assert are_equal(content_of(resumed), expected)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "w" / "step_1")
    assert all(torch.equal(parameter, expected[name]) for name, parameter in exported.named_parameters())


def test_a_failed_write_is_raised_at_the_next_call_of_the_store(tmp_path, tiny_model, world):
    state = open_state(tiny_model, world)
    for ask in (lambda store: store.save(state), CheckpointStore.wait, lambda store: store.is_due(1, last=9)):
        store = open_store(tmp_path, world)
        with file_size_limit(10_000):
            store.save(state)
            store.close()
        with pytest.raises(Exception, match="File too large"):
            ask(store)
    assert complete_steps(tmp_path) == []


POINTS = {"checkpoint.written": 1, "export.written": 1, "checkpoint.before_rename": 2}
"""And the version that must be there afterwards. The kill matrix has the others, where less is half done."""


def train_and_save(model: Path, folder: Path, world: World) -> None:
    """Save version 1, arm the point that the folder is named after, and save version 2."""
    faults = folder / "faults"
    faults.mkdir()
    os.environ["TRIREME_FAULTS"] = f"folder={faults}"
    state = open_state(model, world)
    for version in (1, 2):
        train_until(state, world, until=version)
        if version == 2:
            (faults / folder.name).write_text("kill")
        save_run(folder, state, model, world)


@pytest.mark.parametrize(("point", "version"), POINTS.items())
def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint_complete(tmp_path, point, version, tiny_model, world):
    folder = tmp_path / point
    folder.mkdir()
    run_ranks(__file__, tiny_model, folder, count=1, ends_with=-signal.SIGKILL)
    state = open_state(tiny_model, world)
    exporter = open_exporter(folder / "weights", tiny_model, state.model, world)
    store = open_store(folder / "checkpoints", world, exporter=exporter)
    store.resume(state, resume=True)
    assert state.version == version
    assert are_equal(content_of(state), content_of(train_until(open_state(tiny_model, world), world, until=version)))
    assert (folder / "weights" / f"step_{version}").is_dir()
    assert not list(folder.rglob(".step_*"))  # nothing is left over
    store.save(train_until(state, world, until=3))
    store.wait()
    assert complete_steps(folder / "checkpoints") == [*range(1, version + 1), 3]


def test_saving_waits_while_the_disk_is_full_as_long_as_is_allowed(tmp_path, tiny_model, world):
    state, waits = train_until(open_state(tiny_model, world), world, until=1), Waits("trainer")
    with small_disk(tmp_path / "disk", "8m") as disk:
        exporter = open_exporter(disk / "w", tiny_model, state.model, world)
        store = open_store(disk / "c", world, waits=waits, exporter=exporter)
        store.save(state)
        store.wait()
        ballast = fill(disk)
        hasty = CheckpointStore(disk / "h", Checkpoints(), world, waits=waits, disk_timeout_s=0.0)
        hasty.save(state)
        with pytest.raises(DeadlineExceeded, match="room for checkpoint step_1 from disk"):
            hasty.wait()
        expected = content_of(train_until(state, world, until=2))
        store.save(state)
        until(waits.now)
        assert "for room for checkpoint step_2 from disk" in str(waits)
        train_until(state, world, until=3)
        ballast.unlink()
        store.save(state)  # waits for step 2
        store.wait()
        assert complete_steps(disk / "c") == [1, 2, 3]
        assert sorted(path.name for path in (disk / "w").iterdir()) == ["step_1", "step_2", "step_3"]
        load_checkpoint(state, disk / "c" / "step_2", rank=0)
        assert are_equal(content_of(state), expected)


if __name__ == "__main__":
    run_rank(train_and_save)
