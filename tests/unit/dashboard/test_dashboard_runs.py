"""What the dashboard reads from the folders of runs, as they grow and if they are damaged, and how it draws it."""

import errno
import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from answering import answering_http
from trireme.base.paths import RunPaths
from trireme.launch.folder import hold_folder
from trireme.monitor.metrics import MetricsFile, read_metrics
from trireme.tools.dashboard import runs as module
from trireme.tools.dashboard.history import Metrics, extremes
from trireme.tools.dashboard.logs import TAIL_BYTES, log_files, tail, to_html
from trireme.tools.dashboard.overview import differences, figures
from trireme.tools.dashboard.runs import Library, RunFolder, RunSet
from viewing import Reader


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", -1.0)
    monkeypatch.setattr(module, "SEARCH_S", -1.0)


def write(run: Path, steps: range, *, reward: float = 0.5) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    trainer, orchestrator = (MetricsFile(run / "metrics.jsonl", name) for name in ("trainer", "orchestrator"))
    for step in steps:
        orchestrator.append(step, {"reward/mean": reward + step, "time/step": 1.0})
        trainer.append(step, {"loss": -0.1 * step, "time/step": 2.0, "grad_norm": math.nan if step == 1 else 1.0})
    return run


def configure(run: Path, config: Any) -> None:
    (run / "configs").mkdir(parents=True)
    (run / "configs" / "run.json").write_text(config if isinstance(config, str) else json.dumps(config))


def opened(run: Path) -> RunFolder:
    folder = RunFolder(run, run.name)
    folder.refresh()
    return folder


def shown(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    series = {name: run.metrics.series(name) for name in run.metrics.names()}
    return {name: list(zip(steps.tolist(), map(repr, values), strict=True)) for name, (steps, values) in series.items()}


def test_metrics_are_those_of_the_file_however_it_grows(tmp_path: Path) -> None:
    """A name of several processes has the process before it, but for the trainer's."""
    whole = write(tmp_path / "whole", range(5))
    MetricsFile(whole / "metrics.jsonl", "orchestrator").append(0, {"eval/e/reward": 0.25})
    expected: dict[str, list[tuple[int, Any]]] = {}
    for row in read_metrics(whole / "metrics.jsonl")[0]:
        for name in row.keys() - {"step", "process", "time_s"}:
            both = name == "time/step" and row["process"] == "orchestrator"
            value = np.float64(math.nan if row[name] is None else row[name])
            expected.setdefault(f"orchestrator/{name}" if both else name, []).append((row["step"], repr(value)))
    assert shown(opened(whole)) == expected
    data = (whole / "metrics.jsonl").read_bytes()
    folder = opened(write(tmp_path / "run", range(0)))
    for begin in range(0, len(data), 97):
        with open(folder.path / "metrics.jsonl", "ab") as file:
            file.write(data[begin : begin + 97])
        folder.refresh()
    assert shown(folder) == expected


def test_a_run_that_went_back_shows_nothing_of_the_way_that_it_left() -> None:
    metrics = Metrics()
    metrics.add({"step": step, "process": "trainer", "time_s": step, "loss": 1.0} for step in range(10))
    metrics.add([{"step": 7, "process": "orchestrator", "eval/e/reward": 0.9}])  # it comes late, and is no step back
    assert (metrics.went_back, len(metrics.series("loss").steps)) == ([], 10)
    assert metrics.series("eval/e/reward").steps.tolist() == [7]
    metrics.add({"step": step, "process": "trainer", "time_s": 20 + step, "loss": 2.0} for step in (4, 5))
    steps, values = metrics.series("loss")
    assert steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert values.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert (metrics.went_back, metrics.num_done) == ([4], 6)


def test_rows_that_come_while_a_chart_is_drawn_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """While numpy copies a column it holds it in place, and lets other threads run."""
    metrics, copied = Metrics(), np.array
    rows = [{"step": step, "process": "trainer", "time_s": step, "loss": 1.0 + step} for step in range(3)]
    metrics.add(rows[:1])
    writer = threading.Thread(target=metrics.add, args=(rows[1:],))

    def copy(column: Any, dtype: Any) -> Any:
        with memoryview(column):
            if writer.ident is None:
                writer.start()
            writer.join(0.1)  # a writer that does not wait for this reader ends here
        return copied(column, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "array", copy)
        assert metrics.series("loss").values.tolist() == [1.0]
    writer.join()
    steps, values = metrics.series("loss")
    assert (steps.tolist(), values.tolist(), metrics.num_done) == ([0, 1, 2], [1.0, 2.0, 3.0], 3)


def test_a_folder_that_comes_later_or_is_used_again_is_shown_as_it_is_now(tmp_path: Path) -> None:
    library = Library([tmp_path / "later"])
    library.search()
    (folder,) = library.runs()
    folder.refresh()
    assert folder.state == "not there yet"
    run = write(tmp_path / "later", range(9))
    library.search()
    folder.refresh()
    assert library.runs() == [folder]
    assert (folder.metrics.num_done, folder.state) == (9, "stopped")
    (run / "metrics.jsonl").rename(tmp_path / "aside")
    write(run, range(2), reward=7.0)
    folder.refresh()
    assert folder.metrics.num_done == 2
    assert folder.metrics.series("reward/mean").values.tolist() == [7.0, 8.0]


def test_damaged_files_cost_what_is_damaged_and_no_more(tmp_path: Path) -> None:
    run = write(tmp_path / "run", range(2))
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\x00\xff{"step": 2, "process"\n[1, 2]\n{"step": "x", "process": "trainer"}\n')
    write(run, range(2, 4))
    configure(run, "{ not json")
    folder = opened(run)
    assert folder.metrics.series("reward/mean").steps.tolist() == [0, 1, 2, 3]
    assert folder.config == {}


def test_runs_are_found_below_a_folder_told_apart_and_listed_without_reading_them(tmp_path: Path) -> None:
    for name in ("a/wordle", "b/wordle", "plain", "deep/er/still", *(f"many/run-{n}" for n in range(9))):
        write(tmp_path / name, range(1))
    (tmp_path / "only-planned" / "configs").mkdir(parents=True)
    write(tmp_path / "plain" / "checkpoints" / "inside", range(1))
    library = Library([tmp_path])
    library.search()
    names = [run.name for run in library.runs()]
    assert len(names) == 13
    assert {*names} >= {"a/wordle", "b/wordle", "plain", "still"}
    assert [run.path for run in library.runs() if run.name == "b/wordle"] == [tmp_path / "b" / "wordle"]
    assert library.named("b/wordle") in library.runs()
    assert all(not run.metrics.names() for run in library.runs())
    chosen = [RunFolder(tmp_path, name) for name in ("a/b", "c & d")]
    assert RunSet(Library([]), chosen).link("/tokens", step=3, find=None) == "/tokens?run=a%2Fb&run=c+%26+d&step=3"


def test_a_folder_that_cannot_be_entered_takes_no_other_run_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter all folders, so the calls of the system refuse."""
    write(tmp_path / "mine", range(1))
    theirs = write(tmp_path / "theirs", range(1)) / "run"

    def refuse(call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(path: Any = ".", *args: Any, **named: Any) -> Any:
            if str(theirs.parent) in str(path) and (call is not os.stat or theirs.parent in Path(path).parents):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return call(path, *args, **named)

        return refusing

    for name in ("stat", "scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    for roots, names in (([tmp_path], ["mine"]), ([tmp_path / "mine", theirs], ["mine", "run"])):
        library = Library(roots)
        library.search()
        assert sorted(run.name for run in library.runs()) == names
    library.runs()[-1].refresh()
    assert library.runs()[-1].state == "not there yet"


def test_a_run_is_alive_while_a_launcher_holds_its_folder_or_its_own_orchestrator_answers(tmp_path: Path) -> None:
    run = write(tmp_path / "run", range(1))
    folder = RunFolder(run, "run")
    with hold_folder(RunPaths(run)):
        folder.refresh()
        assert folder.is_live
    folder.refresh()
    assert not folder.is_live
    said = {"run": str(run), "state": "running", "version": 3}
    with answering_http(lambda *_: (200, json.dumps(said).encode())) as port:
        configure(run, {"orchestrator": {"server": {"host": "127.0.0.1", "port": port}}, "max_steps": 5})
        for name, state in ((run, "running"), (tmp_path / "another", "stopped")):
            said["run"] = str(name)
            folder = opened(run)
            assert (folder.status is not None, folder.state) == (name == run, state)


def test_figures_are_what_one_works_out_by_hand(tmp_path: Path) -> None:
    run = write(tmp_path / "run", range(10))
    configure(run, {"max_steps": 10})
    said = {name: value for name, value, _ in figures(opened(run))}
    reward = f"{0.5 + (5 + 6 + 7 + 8 + 9) / 5:.3f}"
    assert said | {"Steps trained": "10 of 10", "Reward": reward, "Seconds a step": "2"} == said


def test_what_differs_between_runs_is_listed_by_key(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-5), ("b", 1e-5), ("c", 1e-4)):
        configure(write(tmp_path / name, range(1)), {"name": name, "trainer": {"optim": {"lr": lr}}})
    rows = differences([opened(tmp_path / name) for name in "abc"])
    assert rows == [{"key": "trainer.optim.lr", "a": "1e-05", "b": "1e-05", "c": "0.0001"}]


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"])))
def test_whatever_a_process_wrote_is_shown_as_text(line: str) -> None:
    page = Reader(to_html([line]))
    assert page.tags == {"span"}
    assert "".join(page.texts) == line


def test_of_a_long_log_the_newest_whole_lines_are_shown_and_a_filter_finds_what_is_far_back(tmp_path: Path) -> None:
    for name in ("environment-x-0", "trainer", "inference-1", "orchestrator"):
        (tmp_path / "logs").mkdir(exist_ok=True)
        (tmp_path / "logs" / f"{name}.stdout").touch()
    assert list(log_files(tmp_path)) == ["orchestrator", "trainer", "inference-1", "environment-x-0"]
    log = log_files(tmp_path)["trainer"]
    lines = [f"line {number:06}" for number in range(50_000)]
    log.write_text("\n".join(lines) + "\n")
    shown = tail(log, most=10)
    assert (shown.lines, shown.is_whole, shown.num_found) == (lines[-10:], False, (TAIL_BYTES - 1) // 12)
    lines[7], lines[9] = "01:02:03 WARNING trainer | Low Memory", "ValueError: low"
    log.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe broken\n")
    assert tail(log, words="MEMORY low").lines == [lines[7]]
    assert tail(log, level="errors").lines == [lines[9]]
    assert tail(log, level="trouble").lines == [lines[7], lines[9]]
    assert tail(tmp_path / "none").lines == []


def test_warnings_that_persist_come_before_those_that_were(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "trainer")
    for step in range(40):
        metrics.append(step, {"policy/entropy": 1.0 if step < 20 else 0.0001, "grad_norm": 500.0 if step == 30 else 1})
    found = [(warned.name, is_lasting) for warned, is_lasting in opened(tmp_path).warnings()]
    assert found[0] == ("entropy_collapse", True)
    assert found[1:] == [("grad_norm_spike", False)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=900), st.integers(4, 60))
def test_however_few_points_are_drawn_the_lowest_and_the_highest_are_among_them(values: list[float], most: int) -> None:
    kept = extremes(np.arange(len(values), dtype=float), np.array(values), most)
    assert len(kept) <= most
    assert {min(values), max(values)} <= {values[at] for at in kept}
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    assert (np.diff(kept) > 0).all()
