"""`rl`: one command, from nothing to a better model; stopped in the middle, continued, and refusing wrong weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_run import END_S, QUICKSTART, Process, Run, started, wait_until

from trireme.trainer.checkpoint import complete_steps

pytestmark = pytest.mark.e2e

STEPS = 60
INTERVAL = 10  # between checkpoints
STOP_AFTER = 2 * INTERVAL + 3


@dataclass(frozen=True)
class Command:
    """A command that has ended."""

    exit_code: int
    output: str
    left: list[str]


@dataclass(frozen=True)
class Stopped:
    """The quickstart, stopped by Ctrl-C."""

    command: Command
    run: Run
    steps: int  # trained by then
    folder: Path


def quickstart(folder: Path, *more: str) -> list[str]:
    flags = ["--max-steps", str(STEPS), "--orchestrator.eval.interval", "none"]
    return ["@", QUICKSTART, "--output-dir", str(folder), *flags, "--trainer.ckpt.interval", str(INTERVAL), *more]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    folder = tmp_path_factory.mktemp("quickstart")
    run = Run(folder / "reverse-text")
    with started("rl", *quickstart(folder), log=folder / "first.log") as rl:

        def is_in_the_middle() -> bool:
            assert rl.poll() is None, rl.tail()
            return len(run.rows("trainer")) >= STOP_AFTER

        wait_until(is_in_the_middle, f"step {STOP_AFTER}", [rl])
        rl.interrupt()
        command = ended(rl, deadline_s=3 * END_S)
        yield Stopped(command, run, len(run.rows("trainer")), folder)


@pytest.fixture(scope="module")
def resumed(stopped: Stopped) -> Command:
    with started("rl", *quickstart(stopped.folder, "--resume"), log=stopped.folder / "second.log") as rl:
        return ended(rl)


def ended(process: Process, **deadline: float) -> Command:
    code = process.wait(**deadline)
    return Command(code, process.output, process.left())


def test_ctrl_c_ends_everything_and_says_how_to_go_on(stopped: Stopped) -> None:
    assert stopped.command.exit_code == 130
    assert stopped.command.left == []
    newest = complete_steps(stopped.run.paths.checkpoints)[-1]
    assert newest >= 2 * INTERVAL
    assert stopped.command.output.splitlines()[-2:] == [
        "stopped by SIGINT",
        f"To go on from step {newest}: the same command with --resume",
    ]


def test_a_stopped_run_goes_on_from_its_newest_checkpoint_to_the_end(stopped: Stopped, resumed: Command) -> None:
    assert resumed.exit_code == 0, resumed.output
    assert resumed.left == []
    newest = stopped.steps // INTERVAL * INTERVAL
    steps = [row["step"] for row in stopped.run.rows("trainer")]
    assert steps == [*range(stopped.steps), *range(newest, STEPS)]
    assert [batch.step for batch in stopped.run.batches()] == list(range(STEPS))
    assert [row["step"] for row in stopped.run.rows("orchestrator")] == list(range(STEPS))


def test_the_quickstart_learns(stopped: Stopped, resumed: Command) -> None:
    held_out = stopped.run.evaluations()
    assert sorted(held_out) == [0, STEPS]
    assert held_out[STEPS] - held_out[0] > 0.25
    last = [row["reward/mean"] for row in stopped.run.rows("orchestrator")[-5:]]
    assert sum(last) / len(last) > 0.6


def test_weights_change_under_requests_in_flight(stopped: Stopped, resumed: Command) -> None:
    """Some rollouts are begun by one version and finished by the next; none is older than allowed."""
    lags = [row["lag/max"] for row in stopped.run.rows("orchestrator")]
    assert 1 <= max(lags) <= 8
    samples = [s for batch in stopped.run.batches() for rollout in batch.rollouts for s in rollout.samples]
    assert any(len(set(sample.versions[sample.loss_mask == 1].tolist())) > 1 for sample in samples)


def test_fresh_tokens_were_sampled_from_the_very_weights_that_are_trained(stopped: Stopped, resumed: Command) -> None:
    fresh = [row["mismatch_kl"] for row in stopped.run.rows("trainer") if "mismatch_kl" in row]
    assert fresh
    assert max(fresh) < 1e-6


def test_plain_output_tells_every_step_and_ends_with_a_summary(stopped: Stopped, resumed: Command) -> None:
    told = stopped.command.output + resumed.output
    missing = [step for step in range(1, STEPS + 1) if f" {step}/{STEPS}  reward " not in told]
    assert missing == []
    summary = resumed.output.splitlines()[-6:]
    assert summary[0].startswith(f"{STEPS} of {STEPS} steps (")
    assert summary[1].startswith("reward ")
    assert summary[2].startswith("held-out reverse-text: ")
    assert summary[3] == f"weights      {stopped.run.weights(STEPS).parent}"


def test_weights_that_arrive_incomplete_end_the_run_before_anything_is_trained(tmp_path: Path) -> None:
    tensor = "model.layers.1.mlp.up_proj.weight"
    arguments = ["@", QUICKSTART, "--output-dir", tmp_path]
    with started("rl", *arguments, log=tmp_path / "rl.log", env={"TRIREME_FAULTS": f"skip_tensor={tensor}"}) as rl:
        assert rl.wait() == 1, rl.tail()
        assert rl.left() == []
        assert "Version 0 was not loaded whole by " in rl.output
        assert "model.layers.1.mlp.gate_up_proj (" in rl.output
    run = Run(tmp_path / "reverse-text")
    assert run.rows("trainer") == run.rows("orchestrator") == []
    assert run.evaluations() == {}
    assert run.batches() == []
