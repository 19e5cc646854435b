"""The way that most models go: `sft`, its result into `rl`, and out again with `trireme export`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from real_run import QUICKSTART, Run, started
from trireme.cli.export import export

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`sft`, whose weights were deleted and exported again; `rl`, which engines served from those."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = ["@", "configs/reverse-text/sft.toml", "--name", "sft", "--max-steps", "2", "--batch-size", "8"]
    arguments += ["--model.from-scratch", "false", "--validation-fraction", "0", "--scheduler.warmup-steps", "0"]
    run(folder, "sft", *arguments)
    shutil.copytree(folder / "sft/weights/step_2", folder / "as_it_was")
    shutil.rmtree(folder / "sft/weights")
    export([str(folder / "sft")])
    arguments = ["@", QUICKSTART, "--name", "rl", "--model.name", str(folder / "sft/weights/step_2")]
    arguments += ["--max-steps", "2", "--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "8"]
    run(folder, "rl", *arguments, "--no-orchestrator.eval", "--trainer.ckpt.interval", "1")
    return folder


def run(folder: Path, program: str, *arguments: str) -> None:
    with started(program, *arguments, "--output-dir", str(folder), log=folder / f"{program}.log") as process:
        assert process.wait() == 0, process.tail()


def test_weights_that_were_exported_again_are_those_that_the_run_had_left(runs: Path) -> None:
    ours, theirs = (
        {path.name: path.read_bytes() for path in (runs / name).iterdir()}
        for name in ("as_it_was", "sft/weights/step_2")
    )
    assert ours == theirs


def test_engines_served_it_and_each_update_was_confirmed(runs: Path) -> None:
    """That engine and trainer agree in logprobs is checked before a version is confirmed."""
    rows = Run(runs / "rl").rows("trainer")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["mismatch_kl"] < 1e-4 for row in rows if "mismatch_kl" in row)


def test_a_step_of_rl_is_exported_as_it_had_been(runs: Path, tmp_path: Path) -> None:
    export([str(runs / "rl"), "--step", "1", "--to", str(tmp_path / "model")])
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", runs / "rl/weights/step_1")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
