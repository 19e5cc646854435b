"""`sft` as people start it: on two ranks as on one, stopped and gone on with, to a result that `rl` starts from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tiny import largest_difference
from trireme.journal.manifest import complete_steps, read_manifest
from trireme.monitor.metrics import read_metrics

DEADLINE_S = 300


def sft(arguments: dict[str, Any]) -> None:
    command = [sys.executable, "-m", "trireme.cli.sft", *(str(word) for pair in arguments.items() for word in pair)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_ranks_and_a_stop_change_nothing_but_rounding(tiny_model: Path, tmp_path: Path) -> None:
    """Four steps on one rank, beside two steps on two ranks that another process goes on from on one rank."""
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
        compared = {"loss", "loss_tokens", "epoch", "validation/loss", "validation/accuracy", "validation/base_loss"}
        assert (found := compared & ours.keys()) == compared & theirs.keys()
        assert {name: ours[name] for name in found} == pytest.approx({name: theirs[name] for name in found}, rel=1e-4)
    weights = [load_file(tmp_path / name / "weights/step_4/model.safetensors") for name in ("one", "two")]
    assert largest_difference(*weights) < 1e-3
    checkpoints = tmp_path / "two" / "checkpoints"
    assert complete_steps(checkpoints) == [2, 4]
    assert [read_manifest(checkpoints / f"step_{step}").world_size for step in (2, 4)] == [2, 1]
