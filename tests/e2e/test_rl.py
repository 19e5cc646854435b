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
    checkpoint: int  # the newest
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
        newest = complete_steps(run.paths.checkpoints)[-1]
        yield Stopped(command, run, len(run.rows("trainer")), newest, folder)


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
    assert stopped.checkpoint >= 2 * INTERVAL
    assert stopped.command.output.splitlines()[-2:] == [
        "stopped by SIGINT",
        f"To go on from step {stopped.checkpoint}: the same command with --resume",
    ]


def test_a_stopped_run_goes_on_from_its_newest_checkpoint_to_the_end(stopped: Stopped, resumed: Command) -> None:
    assert resumed.exit_code == 0, resumed.output
    assert resumed.left == []
    steps = [row["step"] for row in stopped.run.rows("trainer")]
    assert steps == [*range(stopped.steps), *range(stopped.checkpoint, STEPS)]
    assert [batch.step for batch in stopped.run.batches()] == list(range(STEPS))


def test_the_quickstart_learns(stopped: Stopped, resumed: Command) -> None:
    held_out = stopped.run.evaluations()
    assert sorted(held_out) == [0, STEPS]
    assert held_out[STEPS] - held_out[0] > 0.25
    last = [row["reward/mean"] for row in stopped.run.rows("orchestrator")[-5:]]
    assert sum(last) / len(last) > 0.6


def test_generation_runs_ahead_no_further_than_allowed(stopped: Stopped, resumed: Command) -> None:
    lags = [row["lag/max"] for row in stopped.run.rows("orchestrator")]
    assert 1 <= max(lags) <= 8


def test_fresh_tokens_were_sampled_from_the_very_weights_that_are_trained(stopped: Stopped, resumed: Command) -> None:
    fresh = [row["mismatch_kl"] for row in stopped.run.rows("trainer") if "mismatch_kl" in row]
    assert fresh
    assert max(fresh) < 1e-6


def test_plain_output_tells_every_step_and_ends_with_a_summary(stopped: Stopped, resumed: Command) -> None:
    told = stopped.command.output + resumed.output
    missing = [step for step in range(1, STEPS + 1) if f"step {step:>4}/{STEPS}  " not in told]
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
        assert rl.wait() == 3, rl.tail()
        assert rl.left() == []
        assert "Version 0 was not loaded whole by " in rl.output
        assert "model.layers.1.mlp.gate_up_proj (" in rl.output
    run = Run(tmp_path / "reverse-text")
    assert run.rows("trainer") == run.rows("orchestrator") == []
    assert run.evaluations() == {}
    assert run.batches() == []


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    """The engine is in its own processes by then, two levels down."""
    with started("rl", "@", QUICKSTART, "--output-dir", tmp_path, log=tmp_path / "rl.log") as rl:

        def engine_core_runs() -> bool:
            assert rl.poll() is None, rl.tail()
            return any("EngineCore" in process for process in rl.left())

        wait_until(engine_core_runs, "the engine core", [rl])
        rl.kill()
        wait_until(lambda: not rl.left(), "everything to end", [rl], deadline_s=3 * END_S)
