"""The folder of a run has one writer at a time, and only what a run made is moved, replaced or deleted."""

import errno
import fcntl
import json
import os
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest

from support.runs.resolved_runs import run_in
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths
from trireme.base.token import KEY_FILE
from trireme.launch.folder import LOCKS, RUN_ENTRIES, hold, hold_folder, launcher_of, move_aside, prepare_folder
from trireme.monitor.metrics import MetricsFile
from trireme.trainer.sft.dataset import SampleWriter


def make_run(folder: Path) -> None:
    (folder / "journal").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("{}\n")


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# whose files


def test_run_is_refused_in_a_folder_with_files_of_no_run(tmp_path):
    for place in ("other", "group/member"):
        make_run(tmp_path / place)
    for name in ("gepa/wordle", "env-check/wordle", "mine.submissions/20260102-030405-ab12", "evals/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tried" / "configs" / "dry-run").mkdir(parents=True)
    for name in ("refused", "alone/configs"):
        (tmp_path / name).mkdir(parents=True)
    for name in (".launcher", f"{KEY_FILE}.7", "refused/.launcher", "alone/configs/trainer.json"):
        (tmp_path / name).touch()  # the key is one of a launcher that was killed
    assert prepare_folder(run_in(tmp_path)) is None
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "src").mkdir()
    before = names_in(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no run, but src, thesis\.tex - expected an empty folder"):
        prepare_folder(run_in(tmp_path))
    assert names_in(tmp_path) == before


def test_an_earlier_run_is_moved_without_the_files_of_the_user(tmp_path):
    root = tmp_path / "project"
    make_run(root)
    for name in ("checkpoint-5", "wandb", "checkpoints"):
        (root / name).mkdir()
    (root / "thesis.tex").touch()
    make_run(root / "another")
    aside = prepare_folder(run_in(root))
    assert aside == tmp_path / "project.earlier-1"
    assert names_in(root) == ["another", "thesis.tex"]
    assert names_in(aside) == ["checkpoint-5", "checkpoints", "journal", "metrics.jsonl", "wandb"]
    (root / "thesis.tex").unlink()
    assert prepare_folder(run_in(root)) is None  # no run is in the way any more
    (root / "metrics.jsonl").touch()
    assert move_aside(RunPaths(root)) == tmp_path / "project.earlier-2"


def test_a_folder_holds_a_run_until_all_its_files_are_moved(tmp_path, monkeypatch):
    """The launcher may be killed between two of them. The next one takes what is left for a run too."""
    paths, held, rename = RunPaths(tmp_path / "run"), [], Path.rename
    for name in RUN_ENTRIES:
        (paths.root / name).mkdir(parents=True)
    monkeypatch.setattr(Path, "rename", lambda *both: held.append(paths.holds_run) or rename(*both))
    move_aside(paths)
    assert held == [True] * len(RUN_ENTRIES - set(LOCKS.values()))


def test_samples_of_supervised_training_replace_only_samples(tmp_path):
    writer = SampleWriter(seq_len=8, drop=False)
    mine = tmp_path / "data" / "validation"
    mine.mkdir(parents=True)
    (mine / "mine.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no samples .* Choose another `output_dir`"):
        writer.write(mine)
    assert names_in(mine) == ["mine.jsonl"]
    for _ in range(2):
        writer.write(tmp_path / "data" / "train_0")
    assert names_in(tmp_path / "data") == ["train_0", "validation"]


# one writer


@pytest.mark.parametrize("process", ["launcher", "orchestrator", "trainer"])
def test_second_process_of_a_kind_is_refused_in_a_live_run(process, tmp_path):
    paths, words = RunPaths(tmp_path), rf"another {process} \(process {os.getpid()}\) is running in {tmp_path}"
    with hold(paths, process):
        with pytest.raises(ConfigError, match=words), hold_folder(paths, leave_s=0.0):
            pass
        if process != "launcher":
            start = getattr(import_module(f"trireme.cli.{process}"), process)
            with pytest.raises(ConfigError, match=words):
                start(["@", "tests/e2e/scripted.toml", "--output-dir", str(tmp_path)])
    assert not (tmp_path / "configs").exists()  # the configuration there is the running one's
    with hold_folder(paths), hold(paths, "orchestrator"), hold(paths, "trainer"):
        assert launcher_of(paths) == os.getpid()


def test_a_file_system_without_locks_is_named(tmp_path):
    error = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    with (
        patch.object(fcntl, "flock", side_effect=error),
        pytest.raises(ConfigError, match=r"cannot lock files .* Choose another"),
        hold_folder(RunPaths(tmp_path)),
    ):
        pass


def test_a_line_of_metrics_is_on_disk_before_the_step_goes_on(tmp_path, monkeypatch):
    file, synced = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(json.loads(file.read_text())["loss"]))
    MetricsFile(file, "trainer").append(3, {"loss": 0.5})
    assert synced == [0.5]
