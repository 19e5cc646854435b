"""Checkpoints are written while training continues, and survive kills and full disks."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import forkserver
import rank_processes
from limits import file_size_limit, fill, small_disk
from stage import until
from tiny import are_equal, content_of, open_exporter, open_state, open_store, train_until
from trireme.base.errors import DeadlineExceeded
from trireme.base.waiting import Waits
from trireme.config.trainer import Checkpoints
from trireme.journal.manifest import complete_steps
from trireme.trainer.checkpoint.checkpoint import CheckpointStore, load_checkpoint
from trireme.trainer.parallel.mesh import open_world

DEADLINE_S = 120


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("TRIREME_FAULTS", f"folder={folder},disk_full={folder / 'full'}")
    return folder


def test_training_on_does_not_change_what_is_written(tmp_path, tiny_model, world, faults):
    (faults / "checkpoint.begun").write_text("hold")
    state = train_until(open_state(tiny_model, world), world, until=1)
    expected = content_of(state)
    store = open_store(tmp_path / "c", world, exporter=open_exporter(tmp_path / "w", tiny_model, state.model, world))
    store.save(state)
    train_until(state, world, until=3)
    torch.manual_seed(1)
    assert complete_steps(tmp_path / "c") == []
    (faults / "checkpoint.begun.go").touch()
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


def train_and_save(model: Path, folder: Path, point: str) -> None:
    faults = folder / "faults"
    faults.mkdir(parents=True)
    os.environ["TRIREME_FAULTS"] = f"folder={faults}"
    with open_world("cpu", threads=1, timeout_s=240) as world:
        state = open_state(model, world)
        exporter = open_exporter(folder / "weights", model, state.model, world)
        store = open_store(folder / "checkpoints", world, exporter=exporter)
        for version in (1, 2):
            train_until(state, world, until=version)
            if version == 2:
                (faults / point).write_text("kill")
            store.save(state)
            store.wait()


def die_at_each_point(model: Path, folder: Path, *points: str) -> None:
    """In a process and a folder for each point: save version 1, arm the point, save version 2. Prints exit codes."""
    for point in points:
        pid = os.fork()  # nothing but imports has been done
        if pid == 0:
            try:
                train_and_save(model, folder / point, point)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


@pytest.fixture(scope="module")
def killed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    argv = [sys.executable, rank_processes.__file__, __file__, str(tiny_model), str(folder), *POINTS]
    with open(folder / "log", "w") as log:
        process = forkserver.popen(argv, output=log.fileno(), env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder)
        try:
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.close()
    assert (folder / "log").read_text().split().count(str(-signal.SIGKILL)) == len(POINTS)
    return folder


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_point_leaves_the_old_or_the_new_checkpoint_complete(killed, point, tiny_model, world):
    folder, version = killed / point, POINTS[point]
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


def test_a_disk_that_stays_full_ends_the_run(tmp_path, tiny_model, world, faults):
    (faults / "full").touch()
    store = CheckpointStore(tmp_path / "c", Checkpoints(), world, waits=Waits("trainer"), disk_timeout_s=0.0)
    store.save(open_state(tiny_model, world))
    with pytest.raises(DeadlineExceeded, match="room for checkpoint step_0 from disk"):
        store.wait()


def test_saving_waits_while_the_disk_is_full(tmp_path, tiny_model, world):
    state = train_until(open_state(tiny_model, world), world, until=1)
    waits = Waits("trainer")
    with small_disk(tmp_path / "disk", "8m") as disk:
        exporter = open_exporter(disk / "w", tiny_model, state.model, world)
        store = open_store(disk / "c", world, waits=waits, exporter=exporter)
        store.save(state)
        store.wait()
        ballast = fill(disk)
        expected = content_of(train_until(state, world, until=2))
        store.save(state)
        until(waits.now)
        assert str(waits).startswith("trainer waits 0 s for room for checkpoint step_2 from disk")
        train_until(state, world, until=3)
        ballast.unlink()
        store.save(state)  # waits for step 2
        store.wait()
        assert complete_steps(disk / "c") == [1, 2, 3]
        assert sorted(path.name for path in (disk / "w").iterdir()) == ["step_1", "step_2", "step_3"]
        load_checkpoint(state, disk / "c" / "step_2", rank=0)
        assert are_equal(content_of(state), expected)


if __name__ == "__main__":
    die_at_each_point(*map(Path, sys.argv[1:3]), *sys.argv[3:])
