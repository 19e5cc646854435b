"""Other ways to run beside the same engine: generation far ahead, and weights through a folder."""

from real_run import run_apart

ONE_IN_TEN_RAISES = """
calls = 0


def dataset():
    return [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four", "five", "six")]


def reward(completion, answer):
    global calls
    calls += 1
    if calls % 10 == 0:
        raise RuntimeError("the tenth is never scored")
    return len(set(completion) & set(answer)) / 10
"""


def test_a_reward_that_raises_costs_only_its_rollout_while_weights_travel_through_a_folder(engine, tmp_path):
    environment = tmp_path / "moody.py"
    environment.write_text(ONE_IN_TEN_RAISES)
    environments = f'[{{ id = "{environment}", name = "moody" }}]'
    flags = ["--max-steps", "3", "--orchestrator.env", environments, "--no-orchestrator.eval"]
    run = run_apart(engine, tmp_path / "run", *flags, "--weight-broadcast.type", "filesystem")
    assert [len(batch.rollouts) for batch in run.batches()] == [32, 32, 32]
    dropped = [drop for batch in run.batches() for drop in batch.dropped]
    assert {drop.reason for drop in dropped} == {"score: RuntimeError: the tenth is never scored"}
    scored = sum(len(batch.rollouts) for batch in run.batches())
    assert len(dropped) == (scored + len(dropped)) // 10
    rows = run.rows("orchestrator")
    assert sum(row["rollouts/dropped"] for row in rows) == len(dropped)
    assert sum(row.get("rollouts/dropped/score", 0) for row in rows) == len(dropped)
    assert [row["mismatch_kl"] < 1e-6 for row in run.rows("trainer")] == [True] * 3
    assert len(list(run.paths.broadcast.iterdir())) <= 2  # versions 2 and 3; those before have been removed


def test_weights_change_under_requests_in_flight(engine, tmp_path):
    """All three batches are begun by version 0, one request at a time: versions 1 and 2 come long before the last."""
    ahead = ["--max-async-level", "2", "--orchestrator.max-concurrent", "1", "--orchestrator.max-off-policy-steps", "3"]
    small = ["--max-steps", "3", "--orchestrator.batch-size", "8", "--no-orchestrator.eval"]
    long = ["--orchestrator.sampling.max-tokens", "100", "--orchestrator.sampling.extra-body", '{"ignore_eos": true}']
    run = run_apart(engine, tmp_path / "run", *ahead, *small, *long)
    samples = [s for batch in run.batches() for rollout in batch.rollouts for s in rollout.samples]
    versions = [set(sample.versions[sample.loss_mask == 1].tolist()) for sample in samples]
    assert any(len(of_one) > 1 for of_one in versions)
    assert 1 <= max(row["lag/max"] for row in run.rows("orchestrator")) <= 3
    fresh = [row["mismatch_kl"] for row in run.rows("trainer") if "mismatch_kl" in row]
    assert fresh
    assert max(fresh) < 1e-6
