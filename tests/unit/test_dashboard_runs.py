"""What the dashboard knows of runs: from their folders alone, whatever is in them, as they grow."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from trireme.base.paths import RunPaths
from trireme.launch.folder import hold_folder
from trireme.monitor.dashboard import runs as module
from trireme.monitor.dashboard.columns import Columns
from trireme.monitor.dashboard.glance import ago, differences, figures, glance
from trireme.monitor.dashboard.runs import Library, RunFolder, RunSet
from trireme.monitor.metrics import MetricsFile, latest_by_step, merge_processes, read_metrics


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `refresh` looks."""
    monkeypatch.setattr(module, "AGAIN_S", -1.0)
    monkeypatch.setattr(module, "SEARCH_S", -1.0)


def write(run: Path, steps: range, *, reward: float = 0.5) -> None:
    run.mkdir(parents=True, exist_ok=True)
    trainer, orchestrator = (MetricsFile(run / "metrics.jsonl", name) for name in ("trainer", "orchestrator"))
    for step in steps:
        orchestrator.append(step, {"reward/mean": reward + step, "time/step": 1.0})
        trainer.append(step, {"loss": -0.1 * step, "time/step": 2.0, "grad_norm": math.nan if step == 1 else 1.0})


def opened(run: Path) -> RunFolder:
    folder = RunFolder(run, run.name)
    folder.refresh()
    return folder


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if name not in ("process", "time_s")}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in kept.items()}


def test_rows_are_those_of_the_file_merged_by_step(tmp_path: Path) -> None:
    write(tmp_path / "run", range(5))
    MetricsFile(tmp_path / "run" / "metrics.jsonl", "orchestrator").append(0, {"eval/e/reward": 0.25})

    latest = latest_by_step(read_metrics(tmp_path / "run" / "metrics.jsonl")[0])
    expected = [merge_processes([row for (_, of), row in latest.items() if of == step]) for step in range(5)]

    assert [without_clock(row) for row in opened(tmp_path / "run").rows()] == list(map(without_clock, expected))


def test_a_file_that_grows_byte_by_byte_is_read_as_it_would_be_at_once(tmp_path: Path) -> None:
    write(tmp_path / "whole", range(4))
    data = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    run = tmp_path / "run"
    run.mkdir()
    folder = RunFolder(run, "run")
    for begin in range(0, len(data), 97):
        with open(run / "metrics.jsonl", "ab") as file:
            file.write(data[begin : begin + 97])
        folder.refresh()

    assert [without_clock(row) for row in folder.rows()] == [
        without_clock(row) for row in opened(tmp_path / "whole").rows()
    ]


def test_a_run_that_went_back_shows_nothing_of_the_way_that_it_left() -> None:
    columns = Columns()
    columns.add({"step": step, "process": "trainer", "time_s": step, "loss": 1.0} for step in range(10))
    columns.add({"step": step, "process": "trainer", "time_s": 20 + step, "loss": 2.0} for step in (4, 5))

    steps, values = columns.series("loss")
    assert steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert values.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert columns.went_back == [4]
    assert columns.newest_step() == 5


def test_an_evaluation_that_comes_late_is_no_step_back() -> None:
    columns = Columns()
    columns.add({"step": step, "process": "orchestrator", "reward/mean": 0.5} for step in range(8))
    columns.add([{"step": 5, "process": "orchestrator", "eval/e/reward": 0.9}])

    assert columns.went_back == []
    assert len(columns.series("reward/mean").steps) == 8
    assert columns.series("eval/e/reward").steps.tolist() == [5]


def test_a_folder_that_comes_later_is_shown_when_it_is_there(tmp_path: Path) -> None:
    library = Library([tmp_path / "later"])
    library.search()
    (folder,) = library.runs()
    folder.refresh()
    assert folder.state() == "not there yet"

    write(tmp_path / "later", range(3))
    library.search()
    folder.refresh()
    assert library.runs() == [folder]
    assert (folder.num_done, folder.state()) == (3, "stopped")


def test_a_new_run_in_the_same_folder_has_nothing_of_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, range(9))
    folder = opened(run)
    (run / "metrics.jsonl").rename(tmp_path / "aside")
    write(run, range(2), reward=7.0)
    folder.refresh()

    assert folder.num_done == 2
    assert folder.columns.series("reward/mean").values.tolist() == [7.0, 8.0]


def test_damaged_files_cost_what_is_damaged_and_no_more(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, range(2))
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'\x00\xff{"step": 2, "process"\n[1, 2]\n{"step": "x", "process": "trainer"}\n')
    write(run, range(2, 4))
    (run / "configs").mkdir()
    (run / "configs" / "run.json").write_text("{ not json")
    folder = opened(run)

    assert [row["step"] for row in folder.rows()] == [0, 1, 2, 3]
    assert folder.config() == {}
    assert folder.setting("orchestrator.batch_size", 7) == 7


def test_runs_are_found_below_a_folder_and_told_apart(tmp_path: Path) -> None:
    for name in ("a/wordle", "b/wordle", "plain", "deep/er/still"):
        write(tmp_path / name, range(1))
    (tmp_path / "only-planned" / "configs").mkdir(parents=True)
    (tmp_path / "plain" / "checkpoints" / "inside").mkdir(parents=True)
    (tmp_path / "plain" / "checkpoints" / "inside" / "metrics.jsonl").touch()
    library = Library([tmp_path])
    library.search()

    assert sorted(run.name for run in library.runs()) == ["a/wordle", "b/wordle", "plain", "still"]
    found = library.named("b/wordle")
    assert found is not None
    assert found.path == tmp_path / "b" / "wordle"


def test_hundreds_of_runs_are_listed_without_reading_them(tmp_path: Path) -> None:
    for number in range(300):
        write(tmp_path / f"run-{number}", range(1))
    library = Library([tmp_path])
    library.search()

    assert len({run.name for run in library.runs()}) == 300
    assert all(run.generation == 0 and not run.rows() for run in library.runs())


def test_a_run_is_alive_while_a_launcher_holds_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run, range(1))
    folder = RunFolder(run, "run")
    with hold_folder(RunPaths(run)):
        folder.refresh()
        assert folder.is_live()
    folder.refresh()
    assert not folder.is_live()


@contextmanager
def orchestrator(answer: dict[str, Any]) -> Iterator[int]:
    """One that says this when it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("is_its_own", [True, False])
def test_the_port_of_a_run_may_be_another_runs_by_now(tmp_path: Path, *, is_its_own: bool) -> None:
    run = tmp_path / "run"
    write(run, range(1))
    named = run if is_its_own else tmp_path / "another"
    with orchestrator({"run": str(named), "state": "running", "version": 3}) as port:
        (run / "configs").mkdir()
        config = {"orchestrator": {"server": {"host": "127.0.0.1", "port": port}}, "max_steps": 5}
        (run / "configs" / "run.json").write_text(json.dumps(config))
        folder = opened(run)

    assert (folder.status() is not None) == is_its_own
    assert folder.state() == ("running" if is_its_own else "stopped")


def test_figures_are_what_one_works_out_by_hand(tmp_path: Path) -> None:
    write(tmp_path / "run", range(10))
    (tmp_path / "run" / "configs").mkdir()
    (tmp_path / "run" / "configs" / "run.json").write_text('{"max_steps": 10}')
    said = {figure.name: figure.value for figure in figures(opened(tmp_path / "run"))}

    assert said["Steps trained"] == "10 of 10"
    assert said["Reward"] == f"{0.5 + (5 + 6 + 7 + 8 + 9) / 5:.3f}"
    assert said["Seconds a step"] == "2"


def test_a_glance_reads_the_end_of_the_file_alone(tmp_path: Path) -> None:
    write(tmp_path / "run", range(1000))
    seen = glance(RunFolder(tmp_path / "run", "run"))
    assert (seen.step, seen.reward) == (1000, 999.5)
    assert glance(RunFolder(tmp_path / "none", "none")).step is None


def test_what_differs_between_runs_leaves_out_where_they_are(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {"name": "a", "trainer": {"optim": {"lr": 1e-3}}, "ports": {"batches": 1}, "env": [{"id": "x"}]},
        {"name": "b", "trainer": {"optim": {"lr": 1e-4}}, "ports": {"batches": 2}, "env": [{"id": "x"}], "seed": 1},
    ]
    folders = []
    for number, config in enumerate(settings):
        configs = tmp_path / str(number) / "configs"
        configs.mkdir(parents=True)
        (configs / "run.json").write_text(json.dumps(config))
        folders.append(opened(tmp_path / str(number)))

    assert differences(folders) == [("trainer.optim.lr", ["0.001", "0.0001"]), ("seed", ["–", "1"])]


def test_the_address_of_a_page_keeps_the_runs_that_are_looked_at(tmp_path: Path) -> None:
    chosen = [RunFolder(tmp_path, name) for name in ("a/b", "c & d")]
    assert RunSet(Library([]), chosen).link("/tokens", step=3, find=None) == "/tokens?run=a%2Fb&run=c+%26+d&step=3"


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "just now"), (125, "2 min ago"), (7300, "2 h ago"), (90000, "1 d ago")]
)
def test_times_are_said_in_words(seconds: float, words: str) -> None:
    assert ago(1000.0, 1000.0 + seconds) == words
