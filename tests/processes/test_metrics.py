"""`metrics.jsonl` and its mirror."""

from __future__ import annotations

import logging
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limits import file_size_limit, small_disk
from trireme.base.errors import ConfigError
from trireme.config.run import RunConfig
from trireme.monitor import wandb_mirror
from trireme.monitor.metrics import MetricsFile, latest_by_step, merge_processes, read_metrics
from trireme.monitor.wandb_mirror import open_wandb_mirror


def test_a_row_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, "trainer").append(3, {"loss": np.float32(0.5), "num_tokens": 7})
    (row,), offset = read_metrics(path)
    assert row.pop("time_s") > 0
    assert row == {"step": 3, "process": "trainer", "loss": 0.5, "num_tokens": 7}
    assert read_metrics(path, offset) == ([], offset)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_cannot_hold_become_null(tmp_path: Path, number: float) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, "trainer").append(0, {"loss": number})
    assert '"loss": null' in path.read_text()
    assert read_metrics(path)[0][0]["loss"] is None


def test_a_half_written_last_line_waits_for_its_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "process": "trainer"}\n{"step": 1, "proc')
    rows, offset = read_metrics(path)
    assert [row["step"] for row in rows] == [0]
    with open(path, "a") as file:
        file.write('ess": "trainer"}\n')
    rows, offset = read_metrics(path, offset)
    assert [row["step"] for row in rows] == [1]
    assert offset == path.stat().st_size


def test_a_line_cut_short_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "process": "trainer", "lo')
    MetricsFile(path, "trainer").append(1, {})
    assert [row["step"] for row in read_metrics(path)[0]] == [1]


def test_a_new_file_in_the_place_of_the_old_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, "trainer").append(0, {"a_long_name_for_a_metric": 1.0})
    _, offset = read_metrics(path)
    path.write_text('{"step": 5, "process": "trainer"}\n')
    assert [row["step"] for row in read_metrics(path, offset)[0]] == [5]


def test_no_file_yet_is_no_rows_yet(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == ([], 0)


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)[0]]


def test_lines_that_found_no_room_are_written_in_order_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    monkeypatch.setenv("TRIREME_FAULTS", f"disk_full={full}")
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer")
    metrics.append(0, {})
    full.touch()
    for step in (1, 2, 3):
        metrics.append(step, {})
    assert steps_in(metrics.path) == [0]
    assert metrics.waiting == 3
    full.unlink()
    metrics.append(4, {})
    assert steps_in(metrics.path) == [0, 1, 2, 3, 4]
    assert (metrics.waiting, metrics.lost) == (0, 0)


def test_wherever_a_line_is_cut_nobody_takes_the_half_for_a_line_and_none_is_missing(tmp_path: Path) -> None:
    probe = MetricsFile(tmp_path / "probe.jsonl", "trainer")
    probe.append(1, {"loss": 0.5})
    length = probe.path.stat().st_size
    for room in range(length + 1):
        metrics = MetricsFile(tmp_path / f"{room}.jsonl", "trainer")
        metrics.append(0, {})
        with file_size_limit(metrics.path.stat().st_size + room):
            metrics.append(1, {"loss": 0.5})
            assert steps_in(metrics.path) in ([0], [0, 1])
            reader, offset = read_metrics(metrics.path)
        metrics.append(2, {})
        reader += read_metrics(metrics.path, offset)[0]
        assert sorted({row["step"] for row in reader}) == [0, 1, 2]
        assert {row["loss"] for row in reader if row["step"] == 1} == {0.5}
        assert steps_in(metrics.path) == [row["step"] for row in reader]


def test_a_disk_that_is_really_full_loses_no_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        metrics = MetricsFile(disk / "metrics.jsonl", "trainer")
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(50_000))
        for step in range(200):
            metrics.append(step, {"loss": step / 7})
        assert metrics.waiting > 0
        assert steps_in(metrics.path) == list(range(200 - metrics.waiting))
        ballast.unlink()
        metrics.close()
        assert sorted(set(steps_in(metrics.path))) == list(range(200))
        assert metrics.lost == 0


def test_when_too_many_wait_the_oldest_are_lost_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.touch()
    monkeypatch.setenv("TRIREME_FAULTS", f"disk_full={full}")
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer", most_waiting=3)
    for step in range(5):
        metrics.append(step, {})
    assert (metrics.waiting, metrics.lost) == (3, 2)
    full.unlink()
    metrics.close()
    assert steps_in(metrics.path) == [2, 3, 4]


def test_at_the_end_what_still_waits_is_lost_and_counted() -> None:
    metrics = MetricsFile(Path("/dev/full"), "trainer")
    metrics.append(0, {})
    metrics.close(patience_s=0.0)
    assert (metrics.waiting, metrics.lost) == (0, 1)


def test_a_full_disk_ends_no_training_and_warns_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    metrics = MetricsFile(Path("/dev/full"), "trainer", clock=lambda: now)
    logging.getLogger("trireme.metrics").addHandler(caplog.handler)
    try:
        for step in range(3):
            metrics.append(step, {"loss": 1.0})
        assert len(set(map(str, caplog.messages))) == 1
        now = 61.0
        metrics.append(3, {"loss": 1.0})
    finally:
        logging.getLogger("trireme.metrics").removeHandler(caplog.handler)
    assert (metrics.waiting, metrics.lost) == (4, 0)
    assert "/dev/full" in caplog.messages[0]
    assert "No space left" in caplog.messages[0]
    assert "4 lines wait" in caplog.messages[-1]


def test_a_step_trained_again_after_a_resume_counts_once_with_its_last_values() -> None:
    rows = [
        {"step": 4, "process": "trainer", "loss": 9.0},
        {"step": 4, "process": "orchestrator", "reward/mean": 0.1},
        {"step": 4, "process": "trainer", "loss": 1.0},
    ]
    latest = latest_by_step(rows)
    assert latest["trainer", 4]["loss"] == 1.0
    assert latest["orchestrator", 4]["reward/mean"] == 0.1


def test_an_evaluation_and_a_batch_under_one_number_keep_each_others_values() -> None:
    rows = [
        {"step": 4, "process": "orchestrator", "reward/mean": 0.1},
        {"step": 4, "process": "orchestrator", "eval/words/reward": 0.7},
    ]
    row = latest_by_step(rows)["orchestrator", 4]
    assert (row["reward/mean"], row["eval/words/reward"]) == (0.1, 0.7)


def test_a_name_that_both_processes_use_keeps_both_values() -> None:
    merged = merge_processes(
        [{"process": "orchestrator", "step": 1, "time/step": 1.0}, {"process": "trainer", "step": 1, "time/step": 2.0}]
    )
    assert (merged["time/step"], merged["orchestrator/time/step"], merged["step"]) == (2.0, 1.0, 1)


MIRROR_SESSION = """
import math, sys
from trireme.config.run import RunConfig
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.wandb_mirror import open_wandb_mirror

folder, first, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = RunConfig.model_validate({"output_dir": folder, "wandb": {"mode": "offline"}})
with open_wandb_mirror(config):
    for step in range(first, end):
        MetricsFile(config.paths.metrics, "orchestrator").append(step, {"reward/mean": step / 4})
        MetricsFile(config.paths.metrics, "trainer").append(step, {"loss": 1.5, "grad_norm": math.nan})
"""


def test_wandb_gets_each_step_once_with_both_processes_numbers(tmp_path: Path) -> None:
    for first, end in ((0, 3), (3, 5)):  # a run, and its resumption
        command = [sys.executable, "-c", MIRROR_SESSION, str(tmp_path), str(first), str(end)]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len({path.name for path in files}) == 1  # the same wandb run
    history = [row for path in files for row in _wandb_history(path)]
    assert [row["step"] for row in history] == ["0", "1", "2", "3", "4"]
    assert [row["reward/mean"] for row in history] == ["0", "0.25", "0.5", "0.75", "1"]
    assert all(row["loss"] == "1.5" and "grad_norm" not in row for row in history)


class WandbRun:
    id = "one"

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, row: dict[str, Any]) -> None:
        self.steps.append(row["step"])


def test_a_mirror_that_is_killed_goes_on_near_where_it_was_though_the_orchestrator_is_always_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is sent, and of many only the last few a second time."""
    runs: list[WandbRun] = []
    monkeypatch.setattr(wandb_mirror, "_init", lambda config, run_id: runs.append(WandbRun()) or runs[-1])
    config = _wandb_config(tmp_path, "offline")
    orchestrator, trainer = (MetricsFile(config.paths.metrics, name) for name in ("orchestrator", "trainer"))
    killed = wandb_mirror._Mirror(config)
    for step in range(20):
        orchestrator.append(step, {"reward/mean": 0.5})
        if step > 1:
            trainer.append(step - 2, {"loss": 1.0})
        killed._mirror(patience_s=60)
    next_one = wandb_mirror._Mirror(config)
    for step in (18, 19):
        trainer.append(step, {"loss": 1.0})
    next_one._mirror(patience_s=0)
    assert runs[0].steps == list(range(18))
    assert set(runs[0].steps + runs[1].steps) == set(range(20))
    assert len(runs[1].steps) <= 4


def test_wandb_that_cannot_start_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "online")
    with (
        pytest.raises(ConfigError, match=r"--wandb\.mode offline"),
        open_wandb_mirror(_wandb_config(tmp_path, "online")),
    ):
        pass


def test_wandb_that_fails_later_ends_only_the_mirror(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("trireme.wandb").addHandler(caplog.handler)
    config = _wandb_config(tmp_path, "offline")
    with open_wandb_mirror(config):
        import wandb

        assert wandb.run is not None
        wandb.run.finish()  # from now on wandb refuses what is logged
        MetricsFile(config.paths.metrics, "trainer").append(0, {"loss": 1.0})
    logging.getLogger("trireme.wandb").removeHandler(caplog.handler)
    assert "wandb failed" in caplog.text


def _wandb_config(folder: Path, mode: str) -> RunConfig:
    return RunConfig.model_validate({"output_dir": str(folder), "name": "demo", "wandb": {"mode": mode}})


def _wandb_history(path: Path) -> list[dict[str, str]]:
    """History records of a .wandb file: 7 bytes of header, then blocks of LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, rows, partial = path.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        partial += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or last fragment
            record: Any = Record.FromString(partial)
            partial = b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return rows
