"""What `vf-rl` says and writes: lines, samples of what the model writes, and the folders that its users look for."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.ledger.journal import Journal
from trireme.ledger.manifest import MANIFEST, FileEntry, Manifest, describe_file
from trireme.ledger.records import BatchRecord, Rollout, State
from trireme.monitor.checkpoint_folders import CheckpointFolders
from trireme.monitor.progress import EngineStatus, ProcessState, Status
from trireme.monitor.terminal_view import TerminalView
from trireme.monitor.vf_rl_view import VfRlView
from trireme.monitor.view import StatusPoller, View


def rollout(group: int = 0, place: int = 0, reward: float = 1.0, completion: str = "olleh") -> Rollout:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Reverse: "hello"'}]
    said = {"prompt": prompt, "completion": [{"role": "assistant", "content": completion}]}
    where = {"group": group, "place": place, "attempt": 0, "env": "e", "example": group}
    return Rollout(**where, **said, reward=reward, samples=[], temperature=1.0)


class Stage:
    """A run folder, and what a view printed of it."""

    def __init__(self, folder: Path, **console: Any) -> None:
        values = {"output_dir": str(folder), "name": "demo", "max_steps": 100, "device": "cpu", "console": console}
        values["model"] = {"name": "owner/model"}
        values["trainer"] = {"model": {"name": "owner/model"}}
        values["inference"] = {"server": {"port": 8000}}
        values["orchestrator"] = {"batch_size": 8, "rollouts_per_example": 4, "env": [{"id": "owner/reverse-text"}]}
        self.config = RunConfig.model_validate(values)
        self.config.paths.logs.mkdir(parents=True)
        self.poller = StatusPoller("http://nobody.invalid/status")  # never started: `latest` is set by hand
        self.now = 0.0
        self.out = io.StringIO()

    def view(self, kind: type[View]) -> View:
        console = Console(file=self.out, force_terminal=kind is TerminalView, width=140, height=60)
        return kind(self.config, self.poller, console, clock=lambda: self.now)

    def train(self, step: int, **more: float) -> None:
        rows = {
            "orchestrator": {"reward/mean": 0.45} | more,
            "trainer": {"loss": 0.23412, "lr": 1e-05, "policy/entropy": 2.341, "importance_ratio": 1.0201},
        }
        with open(self.config.paths.metrics, "a") as file:
            for process, numbers in rows.items():
                file.write(json.dumps({"step": step, "process": process, "time_s": float(step)} | numbers) + "\n")

    def sample(self, step: int) -> None:
        """A step with its batch, of one rollout."""
        self.train(step)
        folder = self.config.paths.journal
        folder.mkdir(exist_ok=True)
        state = State(sizes={"e": 200})
        Journal(folder).append(BatchRecord(step=step, rollouts=[rollout()], dropped=[], state=state))

    def tick(self, view: View, *, final: bool = False) -> str:
        self.now += 1.0
        self.out.seek(0)
        self.out.truncate()
        names = ("inference", "orchestrator", "trainer")
        view.tick([ProcessState(name, "running", self.config.paths.log(name)) for name in names], final=final)
        return self.out.getvalue()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, style="vf-rl", samples_every=5)


def test_the_start_is_told_in_the_order_in_which_it_happens(stage):
    view = stage.view(VfRlView)
    assert stage.tick(view).splitlines() == [
        "Loading model owner/model...",
        "No GPU is used: inference and training share the CPU.",
        "Starting vLLM server on port 8000...",
        "Waiting for vLLM server to be ready...",
    ]
    assert stage.tick(view) == ""
    stage.poller.latest = Status(state="starting", engines=(EngineStatus(url="u", state="live"),))
    assert stage.tick(view).splitlines() == ["vLLM server is ready", "Loading environment owner/reverse-text..."]
    assert stage.tick(view) == ""


def test_a_step_is_a_row_of_the_trainer_and_a_line(stage):
    """2 groups a step of 200 examples: the first step is a hundredth of an epoch."""
    view = stage.view(VfRlView)
    stage.tick(view)
    stage.sample(0)
    assert stage.tick(view).splitlines()[-2:] == [
        "{'loss': 0.2341, 'learning_rate': 1e-05, 'epoch': 0.01}",
        "Step 1/100: reward=0.45, entropy=2.34, importance_ratio=1.02",
    ]
    stage.train(1, **{"eval/e/reward": 0.12345})
    assert "{'eval_reward': 0.1235, 'step': 1} (e)" in stage.tick(view)


def test_samples_come_with_every_fifth_step(stage):
    view = stage.view(VfRlView)
    for step in range(5):
        stage.sample(step)
    sample = ["=== Step 5 Sample ===", 'Prompt: Reverse: "hello"', "Completion: olleh", "Reward: 1.0"]
    assert stage.tick(view).splitlines()[-4:] == sample
    (stage.config.paths.journal / "batch_000009.msgpack").write_bytes(b"torn")
    for step in range(5, 10):
        stage.train(step)
    shown = stage.tick(view)
    assert "Step 10/100" in shown
    assert "Sample" not in shown


def write_checkpoint(stage: Stage, step: int, content: bytes = b"weights") -> Path:
    """As the trainer leaves one: weights first, then the checkpoint with its manifest."""
    paths = stage.config.paths
    weights, checkpoint = paths.weights / f"step_{step}", paths.checkpoints / f"step_{step}"
    for folder in (weights, checkpoint):
        folder.mkdir(parents=True, exist_ok=True)
    (weights / "adapter_model.safetensors").unlink(missing_ok=True)
    (weights / "adapter_model.safetensors").write_bytes(content)
    (checkpoint / "rank_0.safetensors").write_bytes(content)
    files: dict[str, FileEntry] = {"rank_0.safetensors": describe_file(checkpoint / "rank_0.safetensors")}
    (checkpoint / MANIFEST).write_bytes(msgspec.json.encode(Manifest(step, 1, 0.0, files)))
    return weights


def test_a_checkpoint_folder_holds_what_its_users_look_for_and_takes_no_room(stage):
    for step in range(60):
        stage.train(step)
    weights = write_checkpoint(stage, 50)
    stage.config.paths.log("trainer").write_text("hello\n")
    folder, runs = (stage.config.paths.root / name for name in ("checkpoint-50", "runs"))
    assert f"Saved {folder}" in stage.tick(stage.view(VfRlView))
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_model.safetensors", "trainer_state.json"]
    assert (folder / "adapter_model.safetensors").samefile(weights / "adapter_model.safetensors")
    assert (runs / "logs" / "trainer.stdout").read_text() == "hello\n"
    assert (runs / "metrics.jsonl").samefile(stage.config.paths.metrics)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["step"], state["global_step"], state["max_steps"]) == (50, 50, 100)
    assert [row["step"] for row in state["log_history"]] == list(range(1, 51))
    assert (state["log_history"][0]["learning_rate"], state["log_history"][0]["reward"]) == (1e-05, 0.45)


def test_a_whole_checkpoint_gets_its_folder_once_and_again_where_it_was_trained_again(stage, monkeypatch):
    """Half a checkpoint gets none, and a full disk ends nothing: the folder comes later."""
    folders = CheckpointFolders(stage.config)
    write_checkpoint(stage, 50)
    (stage.config.paths.checkpoints / "step_50" / "rank_0.safetensors").unlink()
    assert folders.write_due() == []
    write_checkpoint(stage, 50)
    full = stage.config.paths.root / "full"
    full.touch()
    monkeypatch.setenv("TRIREME_FAULTS", f"disk_full={full}")
    assert folders.write_due() == []
    full.unlink()
    assert [folders.write_due(), folders.write_due()] == [[50], []]
    write_checkpoint(stage, 50, b"again")
    assert folders.write_due() == [50]
    assert (stage.config.paths.root / "checkpoint-50" / "adapter_model.safetensors").read_bytes() == b"again"


@pytest.mark.parametrize(("keep_last", "left"), [(1, {"60", "mine"}), (None, {"50", "60", "mine"})])
def test_a_checkpoint_that_is_not_to_be_kept_takes_its_folder_with_it(keep_last, left, stage):
    root = stage.config.paths.root
    (root / "checkpoint-mine").mkdir()  # not one of ours
    folders = CheckpointFolders(updated(stage.config, {"trainer.ckpt.keep_last": keep_last}))
    for step in (50, 60):
        write_checkpoint(stage, step)
    folders.write_due()
    shutil.rmtree(stage.config.paths.checkpoints / "step_50")
    folders.write_due()
    assert {folder.name.partition("-")[2] for folder in root.glob("checkpoint-*")} == left
