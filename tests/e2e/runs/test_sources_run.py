"""A run of two sources on vLLM and FSDP2, each with its own group size, sampling, advantage, loss and evaluation."""

import pytest

from support.runs.real_run import Run, run_command


@pytest.mark.slow
def test_two_sources_train_in_one_batch_on_two_ranks_to_the_bit(tmp_path):
    flags = ("--output-dir", tmp_path, "--trainer.num-ranks", "2", "--max-async-level", "1", "--max-steps", "4")
    run_command("rl", "@", "tests/e2e/sources.toml", *flags)
    run = Run(tmp_path)
    rows = run.rows("trainer")
    both = [row for row in rows if "loss/short" in row and "loss/long" in row]
    assert both
    for row in both:
        assert row["loss/short"] + row["loss/long"] == pytest.approx(row["loss"], abs=1e-7)
        assert row["reference_kl/long"] >= 0
    assert max(row["mismatch_kl"] for row in rows if "mismatch_kl" in row) < 1e-6

    # Groups have the size, and rollouts the temperature and the length, of their source.
    for rollout in (rollout for batch in run.batches() for rollout in batch.rollouts):
        size, temperature, longest = {"short": (8, 1.0, 16), "long": (6, 0.8, 24)}[rollout.env]
        assert rollout.place < size
        assert (rollout.temperature, rollout.num_sampled <= longest) == (temperature, True)
    assert {path.relative_to(run.paths.evals).as_posix() for path in run.paths.evals.glob("*/*.jsonl")} == {
        *("step_0/held-long.jsonl", "step_2/held.jsonl", "step_4/held.jsonl", "step_4/held-long.jsonl")
    }
    assert "nothing was lost" in run_command("trireme", "audit", run.root)
    assert "differ" not in run_command("trireme", "replay", run.root)
