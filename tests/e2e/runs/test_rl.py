"""`rl`: one command, from nothing to a better model; stopped in the middle, continued, and refusing wrong weights.

Its first start is the one by `exec`, as a user's.
"""

from typing import NamedTuple

import pytest

from support.runs.real_run import END_S, QUICKSTART, Process, Run, listening_sockets, started, wait_until
from trireme.trainer.checkpoint.checkpoint import complete_steps

STEPS = 60
INTERVAL = 10  # between checkpoints
STOP_AFTER = 2 * INTERVAL + 3


class Stopped(NamedTuple):
    """The quickstart, stopped by Ctrl-C."""

    first: Process
    run: Run
    steps: int  # trained by then
    checkpoint: int  # the newest
    arguments: list[str]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    arguments = ["@", QUICKSTART, "--output-dir", str(folder), "--max-steps", str(STEPS)]
    arguments += ["--orchestrator.eval.interval", "none", "--trainer.ckpt.interval", str(INTERVAL)]
    run = Run(folder / "reverse-text")
    with started("rl", *arguments, log=folder / "first.log", forked=False) as rl:

        def is_in_the_middle() -> bool:
            assert rl.poll() is None, rl.tail()
            return len(run.rows("trainer")) >= STOP_AFTER

        wait_until(is_in_the_middle, f"step {STOP_AFTER}", [rl])
        assert {"127.0.0.1"} <= {address for address, _ in listening_sockets([rl])} <= {"127.0.0.1", "::1"}
        rl.interrupt()
        assert rl.wait(deadline_s=3 * END_S) == 130, rl.tail()
        assert rl.left() == []
        yield Stopped(rl, run, len(run.rows("trainer")), complete_steps(run.paths.checkpoints)[-1], arguments)


@pytest.fixture(scope="module")
def resumed(stopped):
    with started("rl", *stopped.arguments, "--resume", log=stopped.first.log.with_name("second.log")) as rl:
        assert rl.wait() == 0, rl.tail()
        assert rl.left() == []
        return rl


def test_ctrl_c_ends_everything_and_says_how_to_go_on(stopped):
    assert stopped.checkpoint >= 2 * INTERVAL
    assert stopped.first.output.splitlines()[-2:] == [
        "stopped by SIGINT",
        f"To resume from step {stopped.checkpoint}: the same command with --resume",
    ]


def test_a_stopped_run_goes_on_from_its_newest_checkpoint_to_the_end(stopped, resumed):
    steps = [row["step"] for row in stopped.run.rows("trainer")]
    assert steps == [*range(stopped.steps), *range(stopped.checkpoint, STEPS)]
    assert [batch.step for batch in stopped.run.batches()] == list(range(STEPS))
    told = stopped.first.output + resumed.output
    assert [step for step in range(1, STEPS + 1) if f"step {step:>4}/{STEPS}  " not in told] == []
    lines = resumed.output.splitlines()
    (begin,) = [place for place, line in enumerate(lines) if line.startswith(f"{STEPS} of {STEPS} steps (")]
    assert [line.split()[0] for line in lines[begin + 1 : begin + 3]] == ["reward", "held-out"]
    assert f"weights      {stopped.run.weights(STEPS).parent}" in lines[begin:], "perhaps after warnings"


def test_the_quickstart_learns_from_tokens_of_the_weights_that_it_trains(stopped, resumed):
    held_out = stopped.run.evaluations()
    assert sorted(held_out) == [0, STEPS]
    assert held_out[STEPS] - held_out[0] > 0.25
    rows = stopped.run.rows("orchestrator")
    assert sum(row["reward/mean"] for row in rows[-5:]) / 5 > 0.6
    assert 1 <= max(row["lag/max"] for row in rows) <= 8
    fresh = [row["mismatch_kl"] for row in stopped.run.rows("trainer") if "mismatch_kl" in row]
    assert max(fresh) < 1e-6


@pytest.mark.slow  # every tensor has its turn in test_weights_confirmed.py
def test_incompletely_loaded_weights_end_the_run_before_training(tmp_path):
    faults = {"TRIREME_FAULTS": "skip_tensor=model.layers.1.mlp.up_proj.weight,skip_adapter=1"}
    words = ("@", "configs/reverse-text/lora.toml", "--output-dir", tmp_path)
    with started("rl", *words, log=tmp_path / "rl.log", env=faults) as rl:
        assert rl.wait() == 3, rl.tail()
        assert rl.left() == []
        assert "Version 0 was not loaded whole by " in rl.output
        assert "model.layers.1.mlp.gate_up_proj" in rl.output
        assert "model.layers.0.mlp.down_proj (no adapter)" in rl.output
    run = Run(tmp_path / "reverse-text-lora")
    assert (run.rows("trainer"), run.rows("orchestrator"), run.evaluations(), run.batches()) == ([], [], {}, [])
