"""The terminal view, its numbers and the script that shows the logs; and what `vf-rl` says and writes."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.engines.answering import answering_http
from support.processes.stage import until
from support.processes.stage import write_checkpoint as write_manifest
from support.runs.view_stage import Stage
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.monitor.checkpoint_folders import CheckpointFolders
from trireme.monitor.logs import failure_lines, startup_phase
from trireme.monitor.status import EngineStatus, Status, StatusPoller, StatusWait
from trireme.monitor.view import LiveView, VfRlView, open_view

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def test_a_completed_step_and_an_evaluation_are_one_plain_line_each(stage):
    stage.open()
    stage.look()
    stage.train(10, pace_s=0.5)
    stage.train(11, pace_s=0.5, reward=0.534)
    assert stage.look().splitlines()[1] == (
        "step    12/200  reward 0.534  loss 0.0123  grad 0.81  entropy 1.25  ratio 1.02  lag 0.9  12.3k tok/s  ETA 1:34"
    )
    stage.report(0, "orchestrator", **{"eval/words/reward": 0.412})
    assert [stage.look(), stage.look()] == ["eval words 0.412 at version 0\n", ""]
    waits = tuple(StatusWait("trainer", "batch 1", "orchestrator", waited, text=f"w{waited:.0f}") for waited in (2, 7))
    stage.poller.latest = Status(state="starting", waits=waits)
    stage.train(12)
    assert "waits: w7" in stage.look()


def test_a_warning_is_a_plain_line_once(stage):
    stage.open()
    stage.train(0)
    stage.report(1, "trainer", skipped_update=1.0)
    (said,) = [line for line in stage.look().splitlines() if line.startswith("warning")]
    assert said.startswith("warning at step 2, not_finite: skipped_update is 1: the gradient was not finite. ")
    assert "warning" not in stage.look()


def test_each_change_of_state_is_a_line_once(stage):
    stage.open()
    started = ["run: starting", "inference: running", "orchestrator: running", "trainer: running"]
    assert stage.look().splitlines() == started
    for engine, said in (
        (EngineStatus("http://e", "loading"), ["run: starting -> running", "engine http://e: loading"]),
        (EngineStatus("http://e", "live", 0), ["engine http://e: loading -> live", "loading the engine: 3 s"]),
        (EngineStatus("http://e", "quarantined", 0), []),
    ):
        stage.poller.latest = Status(state="running", engines=(engine,))
        assert stage.look().splitlines() == said
    stage.processes[2] = stage.processes[2]._replace(num_restarts=2)
    assert stage.look() == "trainer: running -> running, restarted 2x\n"


def test_each_part_of_the_start_is_told_once_with_its_seconds(tmp_path):
    stage = Stage(tmp_path, orchestrator={"eval": {"interval": 5}})
    stage.open()
    stage.look()
    for state, after_s, told in (
        ("quarantined", 20, "loading the engine: 21 s"),
        ("live", 3, "sending the weights to the engine: 3 s"),
    ):
        stage.poller.latest = Status(state="running", engines=(EngineStatus("http://e", state, 0),))
        assert told in stage.look(after_s=after_s).splitlines()
    assert stage.look(after_s=10) == "evaluating version 0, 10 s …\n"
    assert stage.look(after_s=20) == "", "the same is not told again so soon"
    stage.report(0, "orchestrator", **{"eval/words/reward": 0.412})
    assert "evaluating version 0: 31 s" in stage.look().splitlines()
    stage.train(0)
    assert "the first step: 1 s" in stage.look().splitlines()


def test_silence_is_broken_by_what_is_being_waited_for(stage):
    stage.open()
    stage.look()
    stage.config.paths.log("inference").write_text("INFO Starting to load model m\n")
    assert stage.look(after_s=9) == ""
    assert stage.look(after_s=5) == "loading the engine (inference: loading the model), 15 s …\n"
    assert stage.look(after_s=5) == ""
    wait = StatusWait("orchestrator", "an engine", "inference", 14.2, note="not up")
    stage.poller.latest = Status(state="starting", waits=(wait,))
    assert stage.look(after_s=5) == "inference: not up, 14 s …\n"
    wait = StatusWait("trainer", "batch 4", "orchestrator", 61, text="trainer waits 61 s for batch 4")
    stage.poller.latest = Status(state="running", waits=(wait,))
    stage.look()
    assert stage.look(after_s=59) == ""
    assert stage.look(after_s=2) == "step 0/200 done, waits: trainer waits 61 s for batch 4\n"


def test_a_number_that_cannot_be_shown_does_not_end_the_run(stage):
    stage.open()
    with open(stage.config.paths.metrics, "w") as file:
        file.write('{"step": 0, "process": "trainer", "loss": "much"}\n{"step": 1, "process": "trainer"}\n')
    stage.look()
    stage.train(2)
    assert stage.look() == "", "it stays off"


def test_live_view_shows_progress_processes_and_engines(stage):
    stage.config.paths.log("inference").write_text("(EngineCore pid=1) INFO Loading weights took 3 s\n")
    view = stage.open(LiveView)
    assert "loading the model" in stage.look(), "before anything else is known"
    view.say("[not markup] \x1b[2J a line above the picture")
    assert "[not markup] ␛[2J a line above the picture" in stage.out.getvalue()
    for step in range(12):
        stage.train(step, reward=step / 20)
    stage.report(0, "orchestrator", **{"eval/words/reward": 0.412})
    wait = StatusWait("trainer", "batch 12", "orchestrator", 3, text="trainer waits 3 s for batch 12")
    engine = EngineStatus("http://127.0.0.1:8000", "live", 12)
    stage.poller.latest = Status(state="running", version=12, in_flight=64, waits=(wait,), engines=(engine,))
    picture = stage.look()
    view.close()
    parts = ["demo", "step 12/200", "ETA 3:08", "inference", "64 in flight", "trainer waits 3 s for batch 12", "live"]
    parts += ["version 12  http://127.0.0.1:8000", "█", "reward 0.550  loss 0.0123", "eval words 0.412 at version 0"]
    assert [part for part in parts if part not in picture] == []


def test_the_last_words_are_the_cause_and_not_the_symptom(tmp_path):
    log = tmp_path / "inference.stdout"
    core = "(EngineCore pid=7) Traceback (most recent call last):\n(EngineCore pid=7)   File x\n"
    api = "Traceback (most recent call last):\n  File y\nRuntimeError: Engine core failed. See root cause above.\n"
    log.write_text(f"INFO fine\n{core}(EngineCore pid=7) ValueError: no memory\n{api}resource_tracker: leaks\n")
    words = failure_lines(log)
    assert words[0].endswith("Traceback (most recent call last):")
    assert "(EngineCore pid=7) ValueError: no memory" in words
    assert not any("INFO fine" in line or "resource_tracker" in line for line in words)
    frames = "".join(f'  File "f{i}.py", line {i}\n' for i in range(100))
    log.write_text(f"Traceback (most recent call last):\n{frames}ValueError: boom\n")
    assert (failure_lines(log)[-1], len(failure_lines(log)) < 20) == ("ValueError: boom", True)
    log.write_text("\n".join(["ERROR no space", *(f"line {i}" for i in range(100))]))
    assert [failure_lines(log)[0], failure_lines(log)[-1]] == ["ERROR no space", "line 99"]
    log.write_text("Application startup complete\nTraceback (most recent call last):\nValueError: old\n")
    start = log.stat().st_size  # of the process that was started again
    assert (startup_phase(log, start), failure_lines(log, start)) == ("starting", [])


def test_status_is_taken_when_it_can_be_had_and_missing_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.monitor.status.POLL_S", 0.01)
    answers = [b'{"state": "running", "waits": [{"who": "trainer", "waited_s": 3}], "new": 1}']
    said = Status(state="running", waits=(StatusWait(who="trainer", waited_s=3),))
    with (
        answering_http(lambda *_: (200, answers[0])) as port,
        StatusPoller(f"http://127.0.0.1:{port}", tmp_path) as poller,
    ):
        until(lambda: poller.latest == said)
        answers[0] = b"not json"
        until(lambda: poller.latest is None)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_tmux_panes_follow_logs_that_do_not_exist_yet(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TMUX"} | {"TMUX_TMPDIR": str(tmp_path)}
    logs = tmp_path / "a run" / "logs"

    def said(*command: str) -> str:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True).stdout

    said(str(REPOSITORY / "scripts" / "tmux.sh"), str(logs.parent), "test")
    try:
        lines = said("tmux", "list-panes", "-t", "test", "-F", "#{pane_title} #{pane_id}").splitlines()
        panes = dict(line.split() for line in lines)
        assert set(panes) == {"trainer", "orchestrator", "inference"}
        logs.mkdir(parents=True)
        for name, pane in panes.items():
            (logs / f"{name}.stdout").write_text(f"hello from {name}\n")
            until(lambda pane=pane, name=name: f"hello from {name}" in said("tmux", "capture-pane", "-p", "-t", pane))
    finally:
        said("tmux", "kill-server")


# `vf-rl`

VF_RL: dict[str, Any] = {
    "max_steps": 100, "device": "cpu", "console": {"style": "vf-rl", "samples_every": 5},
    "model": {"name": "owner/model"}, "trainer": {"model": {"name": "owner/model"}},
    "inference": {"server": {"port": 8000}},
    "orchestrator": {"batch_size": 8, "rollouts_per_example": 4, "env": [{"id": "owner/reverse-text"}]},
}  # fmt: skip
VF_NUMBERS = {"loss": 0.23412, "lr": 1e-05, "policy/entropy": 2.341, "importance_ratio": 1.0201}


class VfRlStage(Stage):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, **VF_RL)
        self.open(VfRlView)

    def step(self, step: int, **more: float) -> None:
        self.report(step, "orchestrator", **{"reward/mean": 0.45} | more)
        self.report(step, "trainer", **VF_NUMBERS)

    def sample(self, step: int) -> None:
        self.step(step)
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Reverse: "hello"'}]
        said: dict[str, Any] = {"prompt": prompt, "completion": [{"role": "assistant", "content": "olleh"}]}
        rollout = Rollout(env="e", example=0, temperature=1.0, reward=1.0, samples=[], **said)
        state = State(sizes={"e": 200})
        Journal(self.config.paths.journal).append(BatchRecord(step=step, rollouts=[rollout], dropped=[], state=state))

    def write_checkpoint(self, step: int, *, is_whole: bool = True) -> Path:
        weights = self.config.paths.weights / f"step_{step}"
        weights.mkdir(parents=True)
        (weights / "adapter_model.safetensors").write_bytes(b"weights")
        if is_whole:
            write_manifest(self.config.paths, step)
        return weights


@pytest.fixture
def vf_rl(tmp_path):
    return VfRlStage(tmp_path)


def test_the_start_is_told_in_the_order_in_which_it_happens(vf_rl):
    assert vf_rl.look().splitlines() == [
        "Loading model owner/model...",
        "No GPU is used: inference and training share the CPU.",
        "Starting vLLM server on port 8000...",
        "Waiting for vLLM server to be ready...",
    ]
    assert vf_rl.look() == ""
    vf_rl.poller.latest = Status(state="starting", engines=(EngineStatus(url="u", state="live"),))
    assert vf_rl.look().splitlines() == ["vLLM server is ready", "Loading environment owner/reverse-text..."]
    assert vf_rl.look() == ""


def test_vf_rl_prints_a_row_per_step_with_a_sample_at_every_fifth(vf_rl):
    """2 groups a step of 200 examples: the first step is a hundredth of an epoch."""
    vf_rl.look()
    vf_rl.sample(0)
    assert vf_rl.look().splitlines()[-2:] == [
        "{'loss': 0.2341, 'learning_rate': 1e-05, 'epoch': 0.01}",
        "Step 1/100: reward=0.45, entropy=2.34, importance_ratio=1.02",
    ]
    vf_rl.step(1, **{"eval/e/reward": 0.12345})
    assert "{'eval_reward': 0.1235, 'step': 1} (e)" in vf_rl.look()
    for step in range(1, 5):
        vf_rl.sample(step)
    sample = ["=== Step 5 Sample ===", 'Prompt: Reverse: "hello"', "Completion: olleh", "Reward: 1.0"]
    assert vf_rl.look().splitlines()[-4:] == sample


def test_vf_rl_checkpoint_folder_links_weights_without_copying_them(vf_rl):
    for step in range(60):
        vf_rl.step(step)
    weights = vf_rl.write_checkpoint(50)
    vf_rl.config.paths.log("trainer").write_text("hello\n")
    folder, runs = (vf_rl.config.paths.root / name for name in ("checkpoint-50", "runs"))
    assert f"Saved {folder}" in vf_rl.look()
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_model.safetensors", "trainer_state.json"]
    assert (folder / "adapter_model.safetensors").samefile(weights / "adapter_model.safetensors")
    assert (runs / "logs" / "trainer.stdout").read_text() == "hello\n"
    assert (runs / "metrics.jsonl").samefile(vf_rl.config.paths.metrics)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["step"], state["global_step"], state["max_steps"]) == (50, 50, 100)
    assert [row["step"] for row in state["log_history"]] == list(range(1, 51))
    assert (state["log_history"][0]["learning_rate"], state["log_history"][0]["reward"]) == (1e-05, 0.45)


@pytest.mark.parametrize(("keep_last", "left"), [(1, {"60", "mine"}), (None, {"50", "60", "mine"})])
def test_vf_rl_writes_one_folder_for_each_whole_checkpoint(keep_last, left, vf_rl, monkeypatch):
    root, checkpoints = vf_rl.config.paths.root, vf_rl.config.paths.checkpoints
    (root / "checkpoint-mine").mkdir()  # not one of ours
    folders = CheckpointFolders(updated(vf_rl.config, {"trainer.ckpt.keep_last": keep_last}))
    for step in (50, 60, 70):
        vf_rl.write_checkpoint(step, is_whole=step < 70)
    assert [folders.write_due(), folders.write_due()] == [[50, 60], []]
    shutil.rmtree(checkpoints / "step_50")
    with monkeypatch.context() as patch:  # as killed in the midst of a removal
        patch.setattr(shutil, "rmtree", lambda folder, **_: (folder / "trainer_state.json").unlink(missing_ok=True))
        folders.write_due()
        assert {folder.name.partition("-")[2] for folder in root.glob("checkpoint-*")} == left
    folders.write_due()
    assert not list(root.glob(".checkpoint-*"))


def test_a_view_asks_the_orchestrator_on_its_own_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("trireme.monitor.status.POLL_S", 0.01)
    with socket.create_server(("127.0.0.2", 0)) as orchestrator:
        orchestrator.settimeout(10)
        server = {"host": "0.0.0.0", "port": orchestrator.getsockname()[1]}
        tables = {"orchestrator": {"server": server}, "hosts": {"orchestrator": "127.0.0.2"}}
        with open_view(RunConfig.model_validate({"output_dir": str(tmp_path)} | tables), tmp_path):
            orchestrator.accept()[0].close()
