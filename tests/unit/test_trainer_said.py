"""What the trainer leaves of its own logprobs: those of the weights before the step, and nothing else is different."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny import num_loss_tokens, open_state, random_samples
from trireme.algo.digest import tensor_digest
from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.base.paths import RunPaths
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Optimizer, TrainerConfig
from trireme.ledger.logprobs import counting, logprobs_of, read_logprobs
from trireme.messages import BatchReply, Tokens
from trireme.trainer.mesh import World
from trireme.trainer.said import Said
from trireme.trainer.stepper import Stepper

LENGTHS = [30, 20, 12, 40]


def batch_of(samples: list[Sample]) -> BatchReply:
    rows = micro_batches_of_rank(samples, capacity=64, rank=0, world=1)
    return BatchReply(step=0, micro_batches=rows, loss_tokens=num_loss_tokens(samples), num_rollouts=len(samples))


def step(model: Path, folder: Path, world: World, *, said: Said | None, iterations: int = 1) -> dict[str, str]:
    """Digests of the weights after it."""
    trainer = TrainerConfig(threads=1, optim=Optimizer(lr=1e-2), num_iterations=iterations)
    config = RunConfig(output_dir=folder, device="cpu", model=Model(name=str(model)), trainer=trainer)
    state = open_state(model, world, lr=1e-2)
    Stepper(config, state, world, said=said).step(batch_of(random_samples(LENGTHS)))
    return {name: tensor_digest(_whole(tensor)) for name, tensor in state.model.state_dict().items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def by_plain_arithmetic(model: Path, sample: Sample) -> np.ndarray:
    """One sample alone, without packing: log softmax of logits / temperature."""
    ids = torch.from_numpy(sample.tokens.ids.astype(np.int64))
    with torch.no_grad():
        logits = (
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids[None]).logits[0] / sample.temperature
        )
    chosen = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    return np.concatenate([[np.nan], chosen])


@pytest.mark.parametrize("iterations", [1, 2])
def test_it_is_what_the_weights_said_before_the_step(
    tiny_model: Path, tmp_path: Path, world: World, iterations: int
) -> None:
    said = Said(RunPaths(tmp_path), world)
    step(tiny_model, tmp_path, world, said=said, iterations=iterations)
    said.write()
    known = read_logprobs(tmp_path / "logprobs", 0)
    for sample in random_samples(LENGTHS):
        found, counts = logprobs_of(sample.tokens, known), counting(sample.tokens)
        assert found is not None
        assert found[counts] == pytest.approx(by_plain_arithmetic(tiny_model, sample)[counts], abs=1e-5)


def test_the_weights_come_out_the_same_to_the_bit(tiny_model: Path, tmp_path: Path, world: World) -> None:
    watched = step(tiny_model, tmp_path, world, said=Said(RunPaths(tmp_path), world))
    assert step(tiny_model, tmp_path, world, said=None) == watched


def test_a_batch_without_a_token_that_counts_leaves_an_empty_word(
    tiny_model: Path, tmp_path: Path, world: World
) -> None:
    empty = batch_of([])
    said = Said(RunPaths(tmp_path), world)
    config = RunConfig(output_dir=tmp_path, device="cpu", model=Model(name=str(tiny_model)))
    Stepper(config, open_state(tiny_model, world), world, said=said).step(empty)
    said.write()
    assert [len(logprobs) for logprobs in read_logprobs(tmp_path / "logprobs", 0).values()] == [0]


def test_what_cannot_be_written_ends_nothing_and_is_said_once(
    tiny_model: Path, tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logprobs").write_text("in the way")
    said = Said(RunPaths(tmp_path), world)
    for _ in range(2):
        step(tiny_model, tmp_path, world, said=said)
        said.write()
    assert caplog.text.count("Training goes on") == 1


@dataclass
class SecondOfATeam:
    dp_rank: int = 0
    cp_rank: int = 1


def test_of_a_team_one_writes(tmp_path: Path) -> None:
    said = Said(RunPaths(tmp_path), SecondOfATeam())  # type: ignore[arg-type]
    said.begin(batch_of(random_samples(LENGTHS)))
    said.write()
    assert not (tmp_path / "logprobs").exists()


def test_samples_that_differ_only_in_how_they_were_sampled_are_told_apart() -> None:
    from trireme.ledger.logprobs import identity

    sample = random_samples([12])[0].tokens
    columns = {name: getattr(sample, name) for name in ("ids", "loss_mask", "advantages", "versions")}
    assert identity(Tokens(**columns, logprobs=sample.logprobs + 0.5)) != identity(sample)
