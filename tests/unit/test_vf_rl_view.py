"""What `vf-rl` says and writes: lines, samples of what the model writes, and the folders that its users look for."""

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
from trireme.journal.journal import Journal
from trireme.journal.manifest import MANIFEST, FileEntry, Manifest, describe_file
from trireme.journal.records import BatchRecord, Rollout, State
from trireme.monitor.checkpoint_folders import CheckpointFolders
from trireme.monitor.progress import EngineStatus, ProcessState, Status
from trireme.monitor.view import StatusPoller, VfRlView


class Stage:
    """A run folder, and what a view printed of it."""

    def __init__(self, folder: Path) -> None:
        values: dict[str, Any] = {"output_dir": str(folder), "name": "demo", "max_steps": 100, "device": "cpu"}
        values["console"] = {"style": "vf-rl", "samples_every": 5}
        values["model"] = {"name": "owner/model"}
        values["trainer"] = {"model": {"name": "owner/model"}}
        values["inference"] = {"server": {"port": 8000}}
        values["orchestrator"] = {"batch_size": 8, "rollouts_per_example": 4, "env": [{"id": "owner/reverse-text"}]}
        self.config = RunConfig.model_validate(values)
        self.config.paths.logs.mkdir(parents=True)
        self.poller = StatusPoller("http://nobody.invalid/status")  # never started: `latest` is set by hand
        self.now = 0.0
        self.out = io.StringIO()
        self.view = VfRlView(self.config, self.poller, Console(file=self.out, width=140), clock=lambda: self.now)

    def train(self, step: int, **more: float) -> None:
        rows = {
            "orchestrator": {"reward/mean": 0.45} | more,
            "trainer": {"loss": 0.23412, "lr": 1e-05, "policy/entropy": 2.341, "importance_ratio": 1.0201},
        }
        with open(self.config.paths.metrics, "a") as file:
            for process, numbers in rows.items():
                file.write(json.dumps({"step": step, "process": process, "time_s": float(step)} | numbers) + "\n")

    def sample(self, step: int) -> None:
        self.train(step)
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Reverse: "hello"'}]
        said: dict[str, Any] = {"prompt": prompt, "completion": [{"role": "assistant", "content": "olleh"}]}
        facts: dict[str, Any] = {"group": 0, "place": 0, "attempt": 0, "env": "e", "example": 0, "temperature": 1.0}
        rollout = Rollout(**facts, **said, reward=1.0, samples=[])
        folder = self.config.paths.journal
        folder.mkdir(exist_ok=True)
        state = State(sizes={"e": 200})
        Journal(folder).append(BatchRecord(step=step, rollouts=[rollout], dropped=[], state=state))

    def tick(self) -> str:
        self.now += 1.0
        self.out.seek(0)
        self.out.truncate()
        names = ("inference", "orchestrator", "trainer")
        self.view.tick([ProcessState(name, "running", self.config.paths.log(name)) for name in names], final=False)
        return self.out.getvalue()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_the_start_is_told_in_the_order_in_which_it_happens(stage):
    assert stage.tick().splitlines() == [
        "Loading model owner/model...",
        "No GPU is used: inference and training share the CPU.",
        "Starting vLLM server on port 8000...",
        "Waiting for vLLM server to be ready...",
    ]
    assert stage.tick() == ""
    stage.poller.latest = Status(state="starting", engines=(EngineStatus(url="u", state="live"),))
    assert stage.tick().splitlines() == ["vLLM server is ready", "Loading environment owner/reverse-text..."]
    assert stage.tick() == ""


def test_a_step_is_a_row_of_the_trainer_and_a_line(stage):
    """2 groups a step of 200 examples: the first step is a hundredth of an epoch."""
    stage.tick()
    stage.sample(0)
    assert stage.tick().splitlines()[-2:] == [
        "{'loss': 0.2341, 'learning_rate': 1e-05, 'epoch': 0.01}",
        "Step 1/100: reward=0.45, entropy=2.34, importance_ratio=1.02",
    ]
    stage.train(1, **{"eval/e/reward": 0.12345})
    assert "{'eval_reward': 0.1235, 'step': 1} (e)" in stage.tick()


def test_samples_come_with_every_fifth_step(stage):
    for step in range(5):
        stage.sample(step)
    sample = ["=== Step 5 Sample ===", 'Prompt: Reverse: "hello"', "Completion: olleh", "Reward: 1.0"]
    assert stage.tick().splitlines()[-4:] == sample


def write_checkpoint(stage: Stage, step: int) -> Path:
    paths = stage.config.paths
    weights, checkpoint = paths.weights / f"step_{step}", paths.checkpoints / f"step_{step}"
    for folder in (weights, checkpoint):
        folder.mkdir(parents=True, exist_ok=True)
    (weights / "adapter_model.safetensors").write_bytes(b"weights")
    (checkpoint / "rank_0.safetensors").write_bytes(b"weights")
    files: dict[str, FileEntry] = {"rank_0.safetensors": describe_file(checkpoint / "rank_0.safetensors")}
    (checkpoint / MANIFEST).write_bytes(msgspec.json.encode(Manifest(step, 1, 0.0, files)))
    return weights


def test_a_checkpoint_folder_holds_what_its_users_look_for_and_takes_no_room(stage):
    for step in range(60):
        stage.train(step)
    weights = write_checkpoint(stage, 50)
    stage.config.paths.log("trainer").write_text("hello\n")
    folder, runs = (stage.config.paths.root / name for name in ("checkpoint-50", "runs"))
    assert f"Saved {folder}" in stage.tick()
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_model.safetensors", "trainer_state.json"]
    assert (folder / "adapter_model.safetensors").samefile(weights / "adapter_model.safetensors")
    assert (runs / "logs" / "trainer.stdout").read_text() == "hello\n"
    assert (runs / "metrics.jsonl").samefile(stage.config.paths.metrics)
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["step"], state["global_step"], state["max_steps"]) == (50, 50, 100)
    assert [row["step"] for row in state["log_history"]] == list(range(1, 51))
    assert (state["log_history"][0]["learning_rate"], state["log_history"][0]["reward"]) == (1e-05, 0.45)


@pytest.mark.parametrize(("keep_last", "left"), [(1, {"60", "mine"}), (None, {"50", "60", "mine"})])
def test_a_whole_checkpoint_gets_a_folder_once_which_goes_with_it_unless_all_are_kept(keep_last, left, stage):
    root = stage.config.paths.root
    (root / "checkpoint-mine").mkdir()  # not one of ours
    folders = CheckpointFolders(updated(stage.config, {"trainer.ckpt.keep_last": keep_last}))
    for step in (50, 60, 70):
        write_checkpoint(stage, step)
    (stage.config.paths.checkpoints / "step_70" / "rank_0.safetensors").unlink()
    assert [folders.write_due(), folders.write_due()] == [[50, 60], []]
    shutil.rmtree(stage.config.paths.checkpoints / "step_50")
    folders.write_due()
    assert {folder.name.partition("-")[2] for folder in root.glob("checkpoint-*")} == left
