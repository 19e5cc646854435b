"""`sft`: on two ranks as on one, stopped and gone on with; and its result into `rl`, and out with `trireme export`."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.models.tiny import largest_difference
from support.runs.real_run import run_apart, run_command, started, wait_until
from trireme.journal.manifest import complete_steps, read_manifest
from trireme.monitor.metrics import read_metrics
from trireme.tools.export.export import command as export


def test_exports_after_sft_and_rl_equal_the_weights_of_the_run(engine, tmp_path):
    weights = tmp_path / "sft/weights/step_2"
    words = ["@", "configs/reverse-text/sft.toml", "--output-dir", str(tmp_path), "--name", "sft", "--max-steps", "2"]
    words += ["--batch-size", "8", "--model.from-scratch", "false", "--validation-fraction", "0"]
    run_command("sft", *words, "--scheduler.warmup-steps", "0")
    left = {path.name: path.read_bytes() for path in weights.iterdir()}
    shutil.rmtree(weights.parent)
    export([str(tmp_path / "sft")])
    assert {path.name: path.read_bytes() for path in weights.iterdir()} == left

    rl = ["--model.name", str(weights), "--max-steps", "2", "--no-orchestrator.eval", "--trainer.ckpt.interval", "1"]
    rows = run_apart(engine, tmp_path / "rl", *rl).rows("trainer")
    assert [(row["step"], row["mismatch_kl"] < 1e-4) for row in rows] == [(0, True), (1, True)]

    export([str(tmp_path / "rl"), "--step", "1", "--to", str(tmp_path / "model")])
    folders = (tmp_path / "model", tmp_path / "rl/weights/step_1")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


EVALUATED = """
output_dir = "OUT"
data = "DATA"
model.name = "MODEL"
batch_size = 8
seq_len = 128
optim.lr = 3e-3

[eval]
interval = 2
num_examples = 4
sampling = { max_tokens = 16 }

[[eval.env]]
id = "reverse-text"
args = { max_length = 4 }
"""


@pytest.fixture
def evaluated(tiny_model, tmp_path) -> str:
    """A file of `sft` that evaluates at steps 0, 2, 4, …"""
    lines = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
        for word in ("abc", "on", "reward", "step") * 8
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = {"OUT": tmp_path / "run", "DATA": tmp_path / "data.jsonl", "MODEL": tiny_model}
    text = EVALUATED
    for name, path in places.items():
        text = text.replace(name, str(path))
    (tmp_path / "sft.toml").write_text(text)
    return str(tmp_path / "sft.toml")


@pytest.mark.slow
def test_due_steps_are_evaluated_once_over_a_resume(evaluated, tmp_path):
    evals = tmp_path / "run/evals"
    run_command("sft", "@", evaluated, "--max-steps", "3")
    before = {path: path.read_bytes() for path in evals.glob("step_*/*")}
    described = {path.parent.name: json.loads(data) for path, data in before.items() if path.suffix == ".json"}
    assert sorted(step for step, found in described.items() if found["finished"]) == ["step_0", "step_2", "step_3"]
    assert len({found["weights"] for step, found in described.items() if step != "step_0"}) == 2

    run_command("sft", "@", evaluated, "--max-steps", "4", "--resume")
    assert {path: path.read_bytes() for path in before} == before
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl")[0] if "eval/reverse-text/reward" in row]
    assert [row["step"] for row in rows] == [0, 2, 3, 4]
    rewards = [json.loads(line)["reward"] for line in (evals / "step_4/reverse-text.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/reverse-text/reward"] == pytest.approx(sum(rewards) / 4)


@pytest.mark.slow
def test_nothing_outlives_an_evaluated_run_that_is_killed(evaluated, tmp_path):
    with started("sft", "@", evaluated, "--max-steps", "9000", log=tmp_path / "log", forked=False) as process:
        wait_until((tmp_path / "run/evals/step_0").exists, "the first evaluation", [process])
        process.kill()
        wait_until(lambda: not process.left(), "everything to end", [process], deadline_s=60)


def sft(arguments: dict[str, Any]) -> None:
    run_command("sft", *(word for pair in arguments.items() for word in pair), env={"OMP_NUM_THREADS": "1"})


@pytest.mark.slow  # one rank is stopped and resumed in tests/processes/trainer/test_sft_loop.py
def test_two_ranks_and_a_stop_change_nothing_but_rounding(tiny_model, tmp_path):
    lines = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": letter * (number % 7 + 1)}]}
        for number, letter in enumerate("abcde" * 12)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"--data": tmp_path / "data.jsonl", "--model.name": tiny_model, "--output-dir": tmp_path}
    common |= {"--validation-fraction": 0.2, "--validation-interval": 2, "--batch-size": 12, "--seq-len": 40}
    common |= {"--optim.lr": 1e-3, "--ckpt.interval": 2, "--threads": 1, "--device": "cpu"}
    sft(common | {"--name": "one", "--max-steps": 4})
    sft(common | {"--name": "two", "--max-steps": 2, "--num-ranks": 2, "--scheduler.type": "constant"})
    sft(common | {"--name": "two", "--max-steps": 4, "--resume": "true"})
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in ("one", "two"))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [0, 1, 2, 3]
    for ours, theirs in zip(one, two, strict=True):
        compared = {"loss", "loss_tokens", "epoch", "validation/loss", "validation/base_loss"}
        assert (found := compared & ours.keys()) == compared & theirs.keys()
        assert {name: ours[name] for name in found} == pytest.approx({name: theirs[name] for name in found}, rel=1e-4)
    weights = [load_file(tmp_path / name / "weights/step_4/model.safetensors") for name in ("one", "two")]
    assert largest_difference(*weights) < 1e-3
    checkpoints = tmp_path / "two" / "checkpoints"
    assert complete_steps(checkpoints) == [2, 4]
    assert [read_manifest(checkpoints / f"step_{step}").world_size for step in (2, 4)] == [2, 1]
