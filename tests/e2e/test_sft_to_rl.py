"""The way that most models go: `sft`, its result into `rl`, and out again with `trireme export`."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from real_run import QUICKSTART, Run, started
from trireme.cli.runs.export import export


def run(folder: Path, program: str, *arguments: str) -> None:
    words = (*arguments, "--output-dir", str(folder), "--name", program, "--max-steps", "2")
    with started(program, "@", *words, log=folder / f"{program}.log") as process:
        assert process.wait() == 0, process.tail()


def test_a_model_goes_through_sft_and_rl_and_every_export_is_what_the_run_had_left(tmp_path: Path) -> None:
    """That engine and trainer agree in logprobs is checked before a version is confirmed."""
    weights = tmp_path / "sft/weights/step_2"
    sft = ["--batch-size", "8", "--model.from-scratch", "false", "--validation-fraction", "0"]
    run(tmp_path, "sft", "configs/reverse-text/sft.toml", *sft, "--scheduler.warmup-steps", "0")
    left = {path.name: path.read_bytes() for path in weights.iterdir()}
    shutil.rmtree(weights.parent)
    export([str(tmp_path / "sft")])
    assert {path.name: path.read_bytes() for path in weights.iterdir()} == left

    rl = ["--model.name", str(weights), "--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "8"]
    run(tmp_path, "rl", QUICKSTART, *rl, "--no-orchestrator.eval", "--trainer.ckpt.interval", "1")
    rows = Run(tmp_path / "rl").rows("trainer")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["mismatch_kl"] < 1e-4 for row in rows if "mismatch_kl" in row)

    export([str(tmp_path / "rl"), "--step", "1", "--to", str(tmp_path / "model")])
    folders = (tmp_path / "model", tmp_path / "rl/weights/step_1")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
