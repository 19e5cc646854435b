"""The terminal view, its numbers and the script that shows the logs."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from trireme.config.run import RunConfig
from trireme.monitor.in_words import sparkline
from trireme.monitor.logs import last_words, startup_phase
from trireme.monitor.plain_view import PlainView
from trireme.monitor.progress import EngineStatus, ProcessState, Progress, Status, StatusWait
from trireme.monitor.summary import summary
from trireme.monitor.terminal_view import TerminalView
from trireme.monitor.view import StatusPoller

REPOSITORY = Path(__file__).resolve().parents[2]


class Stage:
    """A run folder, a clock that is set by hand, and what the view printed."""

    def __init__(self, folder: Path, *, max_steps: int = 200) -> None:
        self.config = RunConfig.model_validate({"output_dir": str(folder), "name": "demo", "max_steps": max_steps})
        self.config.paths.logs.mkdir(parents=True)
        self.poller = StatusPoller("http://nobody.invalid/status")  # never started: `latest` is set by hand
        self.now = 0.0
        self.out = io.StringIO()

    def plain(self) -> PlainView:
        console = Console(file=self.out, force_terminal=False)
        return PlainView(self.config, self.poller, console, clock=lambda: self.now)

    def terminal(self) -> TerminalView:
        console = Console(file=self.out, force_terminal=True, width=140, height=60)
        return TerminalView(self.config, self.poller, console, clock=lambda: self.now)

    def report(self, step: int, process: str, time_s: float = 0.0, **metrics: float) -> None:
        row = {"step": step, "process": process, "time_s": time_s}
        with open(self.config.paths.metrics, "a") as file:
            file.write(json.dumps(row | {name.replace("__", "/"): value for name, value in metrics.items()}) + "\n")

    def train(self, step: int, *, reward: float = 0.5, pace_s: float = 1.0) -> None:
        self.report(step, "orchestrator", reward__mean=reward, lag__mean=0.9)
        numbers = {
            "loss": 0.0123,
            "grad_norm": 0.812,
            "mismatch_kl": 3e-7,
            "policy__entropy": 1.25,
            "importance_ratio": 1.02,
        }
        self.report(step, "trainer", step * pace_s, perf__tokens_per_s=12345.0, **numbers)

    def tick(self, view: PlainView | TerminalView, *, after_s: float = 1.0, final: bool = False) -> str:
        """What the view prints when it looks again."""
        self.now += after_s
        self.out.seek(0)
        self.out.truncate()
        view.tick(self.processes(), final=final)
        return self.out.getvalue()

    def processes(self) -> list[ProcessState]:
        names = ("inference", "orchestrator", "trainer")
        return [ProcessState(name, "running", self.config.paths.log(name)) for name in names]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_completed_step_is_one_plain_line(stage: Stage) -> None:
    view = stage.plain()
    stage.tick(view)
    stage.train(10, pace_s=0.5)
    stage.train(11, pace_s=0.5, reward=0.534)
    lines = stage.tick(view).splitlines()
    assert len(lines) == 2
    assert lines[1] == (
        "step    12/200  reward 0.534  loss 0.0123  grad 0.81  entropy 1.25  ratio 1.02  lag 0.9  12.3k tok/s  ETA 1:34"
    )


def test_a_warning_is_a_plain_line_once_and_stays_in_the_picture_while_it_lasts(stage: Stage) -> None:
    view, picture = stage.plain(), stage.terminal()
    stage.tick(view)
    stage.train(0)
    stage.report(1, "trainer", skipped_update=1.0)
    said = [line for line in stage.tick(view).splitlines() if line.startswith("warning")]
    assert len(said) == 1
    assert said[0].startswith("warning at step 2, not_finite: skipped_update is 1: the gradient was not finite. ")
    assert "warning" not in stage.tick(view)
    assert "warning at step 2, not_finite" in stage.tick(picture)
    for step in range(2, 7):
        stage.report(step, "trainer", skipped_update=0.0)
    assert "not_finite" not in stage.tick(picture)
    picture.close()
    assert "warning at step 2, not_finite" in summary(view.progress, stage.config, 1.0)


def test_a_step_waits_for_the_orchestrators_half_but_not_for_ever(stage: Stage) -> None:
    view = stage.plain()
    stage.tick(view)
    stage.report(0, "trainer", loss=1.0)
    assert stage.tick(view) == ""
    stage.report(0, "orchestrator", reward__mean=0.25)
    assert "reward 0.250  loss 1.0" in stage.tick(view)
    stage.report(1, "trainer", loss=2.0)
    assert "step     2/200  loss 2.0" in stage.tick(view, final=True)


def test_a_step_line_tells_the_longest_wait(stage: Stage) -> None:
    view = stage.plain()
    stage.tick(view)
    waits = tuple(StatusWait("trainer", "batch 1", "orchestrator", waited, text=f"w{waited:.0f}") for waited in (2, 7))
    stage.poller.latest = Status(state="running", waits=waits)
    stage.train(0)
    assert "waits: w7" in stage.tick(view)


def test_each_change_of_state_is_a_line_once(stage: Stage) -> None:
    view = stage.plain()
    assert stage.tick(view).splitlines() == [
        "run: starting", "inference: running", "orchestrator: running", "trainer: running"
    ]  # fmt: skip
    stage.poller.latest = Status(state="running", engines=(EngineStatus("http://e", "loading"),))
    assert stage.tick(view).splitlines() == ["run: starting -> running", "engine http://e: loading"]
    stage.poller.latest = Status(state="running", engines=(EngineStatus("http://e", "live", 0),))
    assert stage.tick(view).splitlines() == ["engine http://e: loading -> live"]
    assert stage.tick(view) == ""


def test_a_process_that_was_started_again_shows_it(stage: Stage) -> None:
    view, picture = stage.plain(), stage.terminal()
    stage.tick(view)
    states = stage.processes()
    stage.processes = lambda: [*states[:2], states[2]._replace(state="exit code 1; restarting in 2 s")]  # type: ignore[method-assign]
    assert stage.tick(view) == "trainer: running -> exit code 1; restarting in 2 s\n"
    stage.processes = lambda: [*states[:2], states[2]._replace(num_restarts=2)]  # type: ignore[method-assign]
    assert stage.tick(view) == "trainer: exit code 1; restarting in 2 s -> running, restarted 2x\n"
    stage.poller.latest = Status(state="running")
    assert "running, restarted 2x" in stage.tick(picture)
    picture.close()


def test_the_summary_counts_restarts_where_there_were_any(stage: Stage) -> None:
    progress = Progress(stage.config.max_steps)
    restarts = {"inference": 1, "orchestrator": 0, "trainer": 2}
    assert "\n3 restarts: inference 1, trainer 2\n" in summary(progress, stage.config, 1.0, restarts)
    assert " restart" not in summary(progress, stage.config, 1.0, dict.fromkeys(restarts, 0))


def test_ten_silent_seconds_of_starting_say_what_is_being_waited_for(stage: Stage) -> None:
    view = stage.plain()
    stage.tick(view, after_s=0)
    stage.config.paths.log("inference").write_text("INFO Starting to load model m\n")
    assert stage.tick(view, after_s=9) == ""
    assert stage.tick(view, after_s=5).startswith("inference: loading the model; ")
    assert stage.tick(view, after_s=5) == ""
    wait = StatusWait("orchestrator", "an engine", "inference", 14.2, note="not up")
    stage.poller.latest = Status(state="starting", waits=(wait,))
    assert stage.tick(view, after_s=5) == "inference: not up, 14 s …\n"


def test_a_silent_minute_of_running_says_who_waits_for_whom(stage: Stage) -> None:
    view = stage.plain()
    wait = StatusWait("trainer", "batch 4", "orchestrator", 61, text="trainer waits 61 s for batch 4")
    stage.poller.latest = Status(state="running", waits=(wait,))
    stage.tick(view)
    assert stage.tick(view, after_s=59) == ""
    assert stage.tick(view, after_s=2) == "step 0/200 done, waits: trainer waits 61 s for batch 4\n"


def test_an_evaluation_is_one_line(stage: Stage) -> None:
    view = stage.plain()
    stage.tick(view)
    stage.report(0, "orchestrator", eval__words__reward=0.412)
    assert stage.tick(view) == "eval words 0.412 at version 0\n"
    assert stage.tick(view) == ""


def test_a_resumed_run_does_not_tell_its_history_again(stage: Stage) -> None:
    for step in range(5):
        stage.train(step)
    view = stage.plain()
    assert "step" not in stage.tick(view)
    stage.train(3)  # from the checkpoint of step 3 on
    assert "step     4/200" in stage.tick(view)
    assert "(1 in this session)" in summary(view.progress, stage.config, 1.0)


def test_a_number_that_cannot_be_shown_does_not_end_the_run(stage: Stage) -> None:
    view = stage.plain()
    stage.tick(view)
    with open(stage.config.paths.metrics, "w") as file:
        file.write('{"step": 0, "process": "trainer", "loss": "much"}\n{"step": 1, "process": "trainer"}\n')
    stage.tick(view)
    stage.tick(view)


def test_the_live_picture_shows_steps_processes_engines_and_evaluations(stage: Stage) -> None:
    view = stage.terminal()
    for step in range(12):
        stage.train(step, reward=step / 20)
    stage.report(0, "orchestrator", eval__words__reward=0.412)
    wait = StatusWait("trainer", "batch 12", "orchestrator", 3, text="trainer waits 3 s for batch 12")
    engine = EngineStatus("http://127.0.0.1:8000", "live", 12)
    stage.poller.latest = Status(state="running", version=12, in_flight=64, waits=(wait,), engines=(engine,))
    picture = stage.tick(view)
    view.close()
    for part in ("demo", "step 12/200", "ETA 3:08", "inference", "64 in flight", "trainer waits 3 s for batch 12"):
        assert part in picture
    for part in ("live", "version 12  http://127.0.0.1:8000", "0.550", "0.0123", "12.3k", "3.0e-07", "1.250"):
        assert part in picture
    assert "eval words 0.412 at version 0" in picture
    assert "▁" in picture
    assert "█" in picture
    assert " 4  " not in picture  # only the newest steps have a row
    assert " 5  " in picture


def test_the_live_picture_works_before_anything_is_known(stage: Stage) -> None:
    stage.config.paths.log("inference").write_text("(EngineCore pid=1) INFO Loading weights took 3 s\n")
    view = stage.terminal()
    assert "loading the model" in stage.tick(view)
    view.say("[not markup] a line above the picture")
    assert "[not markup] a line above the picture" in stage.out.getvalue()
    view.close()


def test_the_summary_tells_what_was_learned_and_where_it_lies(stage: Stage) -> None:
    progress = Progress(stage.config.max_steps)
    progress.begin_session()
    for step in range(200):
        progress.add([{"step": step, "process": "orchestrator", "reward/mean": step / 200, "time_s": 0}])
        progress.add([{"step": step, "process": "trainer", "time_s": 0}])
    for version, reward in ((0, 0.412), (200, 0.893)):
        progress.add([{"step": version, "process": "orchestrator", "eval/reverse-text/reward": reward}])
    for folder in ("weights/step_100", "weights/step_200", "checkpoints"):
        (stage.config.paths.root / folder).mkdir(parents=True)
    text = summary(progress, stage.config, 312)
    assert "200 of 200 steps in 5:12" in text
    assert "reward 0.010 -> 0.985" in text
    assert "held-out reverse-text: 0.412 -> 0.893" in text
    assert f"weights      {stage.config.paths.weights / 'step_200'}" in text
    assert f"none in {stage.config.paths.checkpoints}" in text
    assert str(stage.config.paths.logs) in text


def test_the_time_left_follows_the_newest_pace() -> None:
    progress = Progress(100)
    progress.begin_session()
    progress.add([{"step": 0, "process": "trainer", "time_s": 0.0}])
    assert progress.eta_s() is None
    progress.add({"step": step, "process": "trainer", "time_s": 100.0 + 2 * step} for step in range(1, 40))
    assert progress.eta_s() == pytest.approx(2 * 60)


def test_a_sparkline_has_its_lowest_and_highest_value_at_the_ends() -> None:
    assert sparkline([0, 1, 2, 3], 60) == "▁▃▆█"
    assert sparkline([1.0] * 3, 60) == "▁▁▁"
    assert len(sparkline(list(range(1000)), 60)) == 60


def test_the_last_words_are_the_cause_and_not_the_symptom(tmp_path: Path) -> None:
    log = tmp_path / "inference.stdout"
    core = "(EngineCore pid=7) Traceback (most recent call last):\n(EngineCore pid=7)   File x\n"
    api = "Traceback (most recent call last):\n  File y\nRuntimeError: Engine core failed. See root cause above.\n"
    log.write_text(
        f"INFO fine\n{core}(EngineCore pid=7) ValueError: no memory\n{api}resource_tracker: leaked objects\n"
    )
    words = last_words(log)
    assert words[0].endswith("Traceback (most recent call last):")
    assert "(EngineCore pid=7) ValueError: no memory" in words
    assert not any("INFO fine" in line or "resource_tracker" in line for line in words)


def test_the_last_words_of_a_long_traceback_keep_its_end(tmp_path: Path) -> None:
    log = tmp_path / "trainer.stdout"
    frames = "".join(f'  File "f{i}.py", line {i}\n' for i in range(100))
    log.write_text(f"Traceback (most recent call last):\n{frames}ValueError: boom\n")
    words = last_words(log)
    assert words[-1] == "ValueError: boom"
    assert len(words) < 20


def test_the_last_words_without_a_traceback_hold_the_last_error(tmp_path: Path) -> None:
    log = tmp_path / "trainer.stdout"
    log.write_text("\n".join(["ERROR no space", *(f"line {i}" for i in range(100))]))
    words = last_words(log)
    assert words[0] == "ERROR no space"
    assert words[-1] == "line 99"


def test_what_an_earlier_run_of_a_process_said_is_not_this_ones(tmp_path: Path) -> None:
    log = tmp_path / "inference.stdout"
    log.write_text("Application startup complete\nTraceback (most recent call last):\nValueError: old\n")
    start = log.stat().st_size
    assert startup_phase(log, start) == "starting"
    assert last_words(log, start) == []


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """A status server, and what it answers (nothing where that is empty)."""
    answers: list[bytes] = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if answers[0] else 500)
            self.end_headers()
            self.wfile.write(answers[0])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}/status", answers
        http.shutdown()


def test_status_is_taken_when_it_can_be_had_and_missing_otherwise(server: tuple[str, list[bytes]]) -> None:
    url, answers = server
    with StatusPoller(url) as poller:
        answers[0] = b'{"state": "running", "waits": [{"who": "trainer", "waited_s": 3}], "new": 1}'
        _until(lambda: poller.latest is not None)
        assert poller.latest == Status(state="running", waits=(StatusWait(who="trainer", waited_s=3),))
        answers[0] = b"not json"
        _until(lambda: poller.latest is None)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_tmux_panes_follow_logs_that_do_not_exist_yet(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TMUX"} | {"TMUX_TMPDIR": str(tmp_path)}
    run = tmp_path / "a run"

    def tmux(*arguments: str) -> str:
        return subprocess.run(
            ["tmux", *arguments], env=environment, capture_output=True, text=True, timeout=20
        ).stdout  # fmt: skip

    script = [str(REPOSITORY / "scripts" / "tmux.sh"), str(run), "test"]
    subprocess.run(script, env=environment, check=True, timeout=20, capture_output=True)
    try:
        panes = dict(
            line.split() for line in tmux("list-panes", "-t", "test", "-F", "#{pane_title} #{pane_id}").splitlines()
        )
        assert set(panes) == {"trainer", "orchestrator", "inference"}
        (run / "logs").mkdir(parents=True)
        for name in panes:
            (run / "logs" / f"{name}.stdout").write_text(f"hello from {name}\n")
        for name, pane in panes.items():
            _until(lambda name=name, pane=pane: f"hello from {name}" in tmux("capture-pane", "-p", "-t", pane))
    finally:
        tmux("kill-server")


def _until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.05)
