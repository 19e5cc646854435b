"""`vf-rl` from its file to its folders, with a Ctrl-C on the way. The engine is scripted, all else is real."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from support.runs.real_run import started, wait_until
from trireme.base.processes import free_port
from trireme.journal.versions import Versions

pytestmark = pytest.mark.slow

FILE = """
model = "models/reverse-text-tiny"

[env]
id = "tests/e2e/say.py"

[inference]
gpus = 1

[inference.args]
enforce_eager = true

[trainer]
gpus = 1

[trainer.args]
run_name = "said"
micro_batch_size = 2
rollouts_per_example = 2
batch_size = 4
max_steps = 300
max_tokens = 8
max_seq_len = 128
save_steps = 2
vllm_server_port = {port}
"""
IN_THIS_ORDER = (
    "Loading model models/reverse-text-tiny...", "Starting vLLM server on port ", "vLLM server is ready",
    "Loading environment tests/e2e/say.py...", "{'loss': ", "Step 1/300: reward=", "=== Step 5 Sample ===", "stopping",
)  # fmt: skip
FLAGS = ("--one-terminal", "--weight-broadcast.probe-tolerance", "1e9", "--trainer.threads", "1")


def write_file(folder: Path) -> Path:
    file = folder / "said.toml"
    file.write_text(FILE.format(port=free_port()))
    return file


def test_a_run_that_is_interrupted_leaves_folders_and_goes_on(tmp_path):
    file, run = write_file(tmp_path), tmp_path / "said"
    words = ("tests/support/engines/scripted_rl.py", "vf-rl", "@", file, "--output-dir", tmp_path, *FLAGS)
    with started("python", *words, log=tmp_path / "first.log") as first:
        wait_until(lambda: (run / "checkpoint-6").is_dir(), "a third checkpoint", [first])
        first.interrupt()
        assert first.wait() == 130
        assert first.left() == []
        lines = first.output.splitlines()
        places = [next(place for place, line in enumerate(lines) if line.startswith(begin)) for begin in IN_THIS_ORDER]
        assert places == sorted(places), first.output
    reached = Versions(run / "journal").newest
    assert_whole(run / "checkpoint-2")

    again = (*words, "--resume", "--max-steps", str(reached + 2))
    with started("python", *again, log=tmp_path / "second.log") as second:
        assert second.wait() == 0
        assert f"Step {reached + 2}/{reached + 2}: reward=" in second.output
    assert_whole(run / f"checkpoint-{reached + 2}")


def assert_whole(folder: Path) -> None:
    adapters = load_file(folder / "adapter_model.safetensors")
    assert any("lora_A" in name for name in adapters)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 16
    state = json.loads((folder / "trainer_state.json").read_text())
    step = int(folder.name.removeprefix("checkpoint-"))
    trained = [row["step"] for row in state["log_history"] if "loss" in row]
    assert trained == list(range(1, step + 1))
