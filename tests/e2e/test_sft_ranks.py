"""`sft` as people start it: on two ranks as on one, stopped and gone on with, to a result that `rl` starts from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tiny import largest_difference
from trireme.base.devices import Devices
from trireme.config.load import load_run_config
from trireme.config.resolve import resolve
from trireme.config.rules import check_launch
from trireme.ledger.manifest import complete_steps, read_manifest
from trireme.monitor.metrics import read_metrics

pytestmark = pytest.mark.e2e

DEADLINE_S = 300


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`: four steps on one rank. `two`: three steps on two ranks, of which the last was not done as another process
    went on from the second on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    lines = [
        {"messages": [{"role": "user", "content": letter}, {"role": "assistant", "content": letter * (number % 7 + 1)}]}
        for number, letter in enumerate("abcde" * 12)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"--data": folder / "data.jsonl", "--model.name": tiny_model, "--output-dir": folder}
    common |= {"--validation-fraction": 0.2, "--validation-interval": 2, "--batch-size": 12, "--seq-len": 40}
    common |= {"--optim.lr": 1e-3, "--ckpt.interval": 2, "--threads": 1, "--device": "cpu"}
    sft(common | {"--name": "one", "--max-steps": 4})
    sft(common | {"--name": "two", "--max-steps": 2, "--num-ranks": 2, "--scheduler.type": "constant"})
    sft(common | {"--name": "two", "--max-steps": 4, "--resume": "true"})
    return folder


def sft(arguments: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "trireme.cli.sft", *(str(word) for pair in arguments.items() for word in pair)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_ranks_and_a_stop_change_nothing_but_rounding(runs: Path) -> None:
    one, two = (read_metrics(runs / name / "metrics.jsonl")[0] for name in ("one", "two"))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [0, 1, 2, 3]
    for ours, theirs in zip(one, two, strict=True):
        compared = {"loss", "loss_tokens", "epoch", "validation/loss", "validation/accuracy", "validation/base_loss"}
        assert (found := compared & ours.keys()) == compared & theirs.keys()
        assert {name: ours[name] for name in found} == pytest.approx({name: theirs[name] for name in found}, rel=1e-4)
    weights = [load_file(runs / name / "weights/step_4/model.safetensors") for name in ("one", "two")]
    assert largest_difference(*weights) < 1e-3
    checkpoints = runs / "two" / "checkpoints"
    assert complete_steps(checkpoints) == [2, 4]
    assert [read_manifest(checkpoints / f"step_{step}").world_size for step in (2, 4)] == [2, 1]


def test_its_result_is_a_model_that_rl_starts_from(runs: Path) -> None:
    model = runs / "one" / "weights" / "step_4"
    devices = Devices(cores=2)
    typed = ["--model.name", str(model), "--orchestrator.env", '[{"id": "reverse-text"}]', "--device", "cpu"]
    config, _ = load_run_config(typed, program="rl")
    check_launch(resolve(config, devices), devices)
    assert all(torch.isfinite(tensor).all() for tensor in load_file(model / "model.safetensors").values())
