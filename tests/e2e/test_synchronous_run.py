"""A synchronous run, each process started by its own command as in three terminals: exact, and reproducible to the bit.

All of them attach to one living engine, which has served other runs before.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from real_run import Run, SharedEngine, run_apart, started_apart

pytestmark = pytest.mark.e2e

STEPS = 6


def test_the_engine_samples_from_the_very_weights_that_are_trained(straight: Run) -> None:
    """Float32 and tied embeddings: nothing but rounding lies between the two forward passes."""
    assert [row["mismatch_kl"] < 1e-6 for row in straight.rows("trainer")] == [True] * STEPS
    assert [(row["lag/mean"], row["lag/max"]) for row in straight.rows("orchestrator")] == [(0, 0)] * STEPS


def test_every_step_is_on_disk(straight: Run) -> None:
    assert [row["step"] for row in straight.rows("trainer")] == list(range(STEPS))
    assert [row["step"] for row in straight.rows("orchestrator")] == list(range(STEPS))
    assert [batch.step for batch in straight.batches()] == list(range(STEPS))
    assert [len(batch.rollouts) for batch in straight.batches()] == [32] * STEPS
    assert sorted(path.name for path in straight.paths.checkpoints.iterdir()) == ["step_3", "step_6"]


def test_held_out_examples_are_evaluated_before_and_after(straight: Run) -> None:
    assert sorted(straight.evaluations()) == [0, STEPS]


def test_the_weights_load_with_transformers(straight: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = straight.weights(STEPS).parent
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]
    assert model.config.architectures == ["Qwen3ForCausalLM"]


def test_training_moves_the_weights(straight: Run) -> None:
    early, late = straight.tensors(3), straight.tensors(STEPS)
    assert all(np.abs(late[name] - early[name]).max() > 0 for name in early)


def test_the_same_run_twice_gives_the_same_bits(straight: Run, engine: SharedEngine, tmp_path: Path) -> None:
    again = run_apart(engine, tmp_path / "again")
    assert tokens_of(again) == tokens_of(straight)
    assert again.weights(STEPS).read_bytes() == straight.weights(STEPS).read_bytes()


def test_a_resumed_run_ends_with_the_same_bits(straight: Run, engine: SharedEngine, tmp_path: Path) -> None:
    run_apart(engine, tmp_path / "run", "--max-steps", "3")
    resumed = run_apart(engine, tmp_path / "run", "--trainer.ckpt.resume-step", "3")
    assert tokens_of(resumed) == tokens_of(straight)
    assert resumed.weights(STEPS).read_bytes() == straight.weights(STEPS).read_bytes()
    assert [row["step"] for row in resumed.rows("trainer")] == list(range(STEPS))
    assert sorted(resumed.evaluations()) == [0, 3, STEPS]


def test_a_run_that_is_killed_twice_ends_with_the_same_bits(
    straight: Run, engine: SharedEngine, tmp_path: Path
) -> None:
    """Once before its first checkpoint and once after it; the engine lives on, with what was under way in it."""
    for steps in (2, 4):
        with started_apart(engine, tmp_path / "run", "--resume") as pair:
            pair.until_trained(steps)
            pair.kill()
    resumed = run_apart(engine, tmp_path / "run", "--resume")
    assert tokens_of(resumed) == tokens_of(straight)
    assert resumed.weights(STEPS).read_bytes() == straight.weights(STEPS).read_bytes()


def test_an_environment_worker_that_dies_costs_nothing(straight: Run, engine: SharedEngine, tmp_path: Path) -> None:
    """Its rollouts are issued again, with the same seeds."""
    with started_apart(engine, tmp_path / "run") as pair:
        pair.until_trained(2)
        pair.kill_environment_worker()
        pair.until_done()
    assert tokens_of(pair.run) == tokens_of(straight)
    assert pair.run.weights(STEPS).read_bytes() == straight.weights(STEPS).read_bytes()


def test_two_ranks_take_the_steps_of_one(straight: Run, engine: SharedEngine, tmp_path: Path) -> None:
    """Sums over other shares round differently, and Adam makes that visible; nothing more may differ."""
    two = run_apart(engine, tmp_path / "run", "--trainer.num-ranks", "2", "--max-steps", "3")
    ours, theirs = two.rows("trainer"), straight.rows("trainer")
    assert [row["step"] for row in ours] == [0, 1, 2]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], rel=1e-5, abs=1e-7)
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-5)
    assert [row["mismatch_kl"] < 1e-6 for row in ours] == [True] * 3
    assert tokens_of(two) == tokens_of(straight)[:3]
    assert distance(two.tensors(3), straight.tensors(3)) < 0.01 * distance(straight.tensors(3), straight.tensors(6))


def tokens_of(run: Run) -> list[list[list[int]]]:
    """Token ids of each sample of each batch."""
    return [
        [sample.ids.tolist() for rollout in batch.rollouts for sample in rollout.samples] for batch in run.batches()
    ]


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(one[name] - other[name]).sum() for name in one)))
