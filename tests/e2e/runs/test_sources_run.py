"""Runs of several sources on vLLM and FSDP2, each with an algorithm of its own."""

import pytest

from support.runs.real_run import Run, open_engine, run_command


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


# In the grammar of prime-rl.
ALGORITHMS = """
max_steps = 4
seq_len = 160
seed = 7
model.name = "models/alphabet-sort-tiny"
trainer = { num_ranks = 2, micro_batch_tokens = 512 }
[orchestrator]
batch_size = 24
group_size = 4
[orchestrator.train.sampling]
max_completion_tokens = 24
[[orchestrator.train.source]]
name = "taught"
algo = { type = "sft", sampling = { source = { name = "models/alphabet-sort-tiny", base_url = "http://ADDRESS/v1" } } }
env.taskset = { id = "reverse-text", max_length = 6 }
[[orchestrator.train.source]]
name = "echoed"
algo = { type = "echo", roles = { user = { alpha = 0.1 } } }
env.taskset = { id = "alphabet-sort", items = "letters", min_turns = 2, max_turns = 3, max_names_per_turn = 2 }
[[orchestrator.train.source]]
name = "shown"
group_size = 1
algo = { type = "opsd", demo_key = "answer" }
env.taskset = { id = "reverse-text", max_length = 6 }
"""


@pytest.mark.slow
def test_tokens_that_the_policy_did_not_sample_train_it_to_the_bit(tmp_path):
    longer = ("--model.name", "models/alphabet-sort-tiny", "--inference.model.max-model-len", "161", "--seq-len", "161")
    with open_engine(tmp_path / "teacher", *longer, forked=False) as teacher:
        (tmp_path / "rl.toml").write_text(ALGORITHMS.replace("ADDRESS", f"127.0.0.1:{teacher.port}"))
        run_command("rl", "@", tmp_path / "rl.toml", "--output-dir", tmp_path / "run")
    run = Run(tmp_path / "run")
    found = set()
    for rollout in (rollout for batch in run.batches() for rollout in batch.rollouts):
        found.add((rollout.env, rollout.model))
        has_others = rollout.env == "taught" or (rollout.env == "echoed" and rollout.num_turns > 1)
        for sample in rollout.samples:
            assert sample.by_cross_entropy.any() == has_others
            assert (sample.loss_mask[sample.by_cross_entropy] == (rollout.env == "taught")).all()
            assert (sample.versions[sample.by_cross_entropy] == -1).all()
        assert len(rollout.teacher) == len(rollout.samples) * (rollout.env == "shown")
    assert found == {("taught", "models/alphabet-sort-tiny"), ("echoed", ""), ("shown", "")}
    assert "alphabet-sort-tiny sampled rollouts of taught" in run_command("trireme", "audit", run.root)
    assert "differ" not in run_command("trireme", "replay", run.root)
