"""A run with pictures on vLLM and FSDP2, from an environment's data URI to the trainer's forward pass, and resumed."""

import pytest

from support.runs.real_run import Run, run_command


@pytest.mark.slow
def test_engine_and_trainer_see_the_same_pictures_also_after_a_resume(tmp_path):
    flags = ("@", "configs/color-squares/rl.toml", "--output-dir", tmp_path, "--orchestrator.eval.interval", "none")
    flags = (*flags, "--trainer.ckpt.interval", "2", "--trainer.optim.lr", "1e-4")  # the least rate, which stays
    run_command("rl", *flags, "--max-steps", "2")
    run_command("rl", *flags, "--max-steps", "5", "--resume")
    run = Run(tmp_path / "color-squares")
    rows = run.rows("trainer")
    assert [row["step"] for row in rows] == list(range(5))
    assert max(row["mismatch_kl"] for row in rows if "mismatch_kl" in row) < 1e-6
    assert min(row["grad_norm"] for row in rows) > 0
    shown = set()
    for rollout in (rollout for batch in run.batches() for rollout in batch.rollouts):
        (sample,), (message,) = rollout.samples, rollout.prompt
        ((digest, size),) = ((picture.digest, picture.num_tokens) for picture in sample.pictures)
        assert message["content"][0]["image_url"]["url"] == f"picture:{digest}"
        assert size == 4
        shown.add(f"{digest}.png")
    assert {path.name for path in (run.paths.journal / "pictures").iterdir()} >= shown
    assert "nothing was lost" in run_command("trireme", "audit", run.root)
    assert "differ" not in run_command("trireme", "replay", run.root)
