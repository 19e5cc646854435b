"""A synchronous run, each process started by its own command as in three terminals: exact, and reproducible to the bit.

All of them attach to one living engine, which has served other runs before.
"""

import numpy as np
import pytest

from support.runs.real_run import Run, listening_sockets, run_apart, started_apart

STEPS = 6


def test_synchronous_run_samples_from_the_trained_weights(straight):
    trainer, orchestrator = straight.rows("trainer"), straight.rows("orchestrator")
    assert [(row["step"], row["mismatch_kl"] < 1e-6) for row in trainer] == [(step, True) for step in range(STEPS)]
    steps = [(row["step"], row["lag/mean"], row["lag/max"]) for row in orchestrator]
    assert steps == [(step, 0, 0) for step in range(STEPS)]
    assert [(batch.step, len(batch.rollouts)) for batch in straight.batches()] == [(step, 32) for step in range(STEPS)]
    assert sorted(path.name for path in straight.paths.checkpoints.iterdir()) == ["step_3", "step_6"]
    assert sorted(straight.evaluations()) == [0, STEPS]


def test_a_resumed_run_that_sends_only_changes_ends_with_the_same_bits(straight, engine, tmp_path):
    delta = ("--weight-broadcast.delta", "true")
    run_apart(engine, tmp_path / "run", *delta, "--max-steps", "3")
    resumed = run_apart(engine, tmp_path / "run", *delta, "--trainer.ckpt.resume-step", "3")
    assert tokens_of(resumed) == tokens_of(straight)
    assert resumed.weights(STEPS).read_bytes() == straight.weights(STEPS).read_bytes()
    rows = resumed.rows("trainer")
    assert [(row["step"], row["weights/changed_frac"] > 0.9) for row in rows] == [(step, True) for step in range(STEPS)]
    assert sorted(resumed.evaluations()) == [0, 3, STEPS]


@pytest.mark.slow  # the quick tier compares ranks in test_ranks.py, and looks at sockets in test_rl.py
def test_two_ranks_take_the_steps_of_one_and_listen_on_loopback_only(straight, engine, tmp_path):
    """Sums over other shares round differently, and Adam makes that visible; nothing more may differ."""
    flags = ("--trainer.num-ranks", "2", "--max-steps", "3")
    with started_apart(engine, tmp_path / "run", *flags) as pair:
        pair.until_trained(1)
        found = listening_sockets([*pair.processes, engine.process])
        pair.until_done()
    assert {port for _, port in found} >= {engine.port, pair.status_port}
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    ours, theirs = pair.run.rows("trainer"), straight.rows("trainer")
    assert [(row["step"], row["mismatch_kl"] < 1e-6) for row in ours] == [(0, True), (1, True), (2, True)]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5, abs=1e-7)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-5)
    assert tokens_of(pair.run) == tokens_of(straight)[:3]
    moved = distance(straight.tensors(3), straight.tensors(6))
    assert distance(pair.run.tensors(3), straight.tensors(3)) < 0.01 * moved


def tokens_of(run: Run) -> list[list[list[int]]]:
    return [[one.ids.tolist() for rollout in batch.rollouts for one in rollout.samples] for batch in run.batches()]


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(one[name] - other[name]).sum() for name in one)))
