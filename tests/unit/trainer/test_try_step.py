"""A step is tried before the first, and leaves its logprobs behind: neither changes anything else."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.models.moe import save_moe
from support.models.tiny import are_equal, batch_reply, content_of, one_row, random_samples, train, weights_of
from trireme.base.paths import RunPaths
from trireme.config.losses import Loss
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import Lora, Optimizer, TrainerConfig, TrainerModel
from trireme.journal.logprobs import counting, identity, logprobs_of, read_logprobs
from trireme.messages import Tokens
from trireme.trainer.logprob_log import LogprobLog
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.parallel.mesh import World
from trireme.trainer.step import Stepper, base_state
from trireme.trainer.try_step import longest_row, try_step

CAPACITY = 100
EVERY_TERM = Loss(beta=0.1, proximal="recomputed", entropy_bonus=0.01, reference_update_every=1)


def config_of(folder: Path, **trainer: Any) -> RunConfig:
    settings = {"optim": Optimizer(lr=1e-3, weight_decay=0.1), "micro_batch_tokens": CAPACITY} | trainer
    return RunConfig(device="cpu", seq_len=40, model=Model(name=str(folder)), trainer=TrainerConfig(**settings))


def trained(config: RunConfig, world: World, *, tried_at: list[int]) -> tuple[list[dict[str, float]], Any]:
    state, metrics = base_state(config, world), []
    for version in range(2):
        if version in tried_at:
            try_step(Stepper(config, state, world))
        metrics += train(config, state, world, until=version + 1, lengths=[30, 20, 12], capacity=CAPACITY)
    return metrics, content_of(state)


KINDS: tuple[Any, ...] = ("adamw_8bit", "muon", "sgd", "sign_sgd")
WAYS: dict[str, dict[str, Any]] = {
    **{kind: {"optim": Optimizer(type=kind, lr=1e-3, weight_decay=0.1)} for kind in KINDS},
    "experts": {"loss": EVERY_TERM, "num_iterations": 2},
    "every term with adapters that drop": {"loss": EVERY_TERM, "model": TrainerModel(lora=Lora(dropout=0.3))},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tried_step_changes_nothing_to_the_bit(tiny_model, tmp_path, world, way):
    """Neither of a fresh run nor of one with an optimizer's state; and its tokens are no loads of experts."""
    config = config_of(save_moe(tmp_path) if way == "experts" else tiny_model, **WAYS[way])
    metrics, content = trained(config, world, tried_at=[])
    tried_metrics, tried_content = trained(config, world, tried_at=[0, 1])
    assert ("moe/busiest_expert" in metrics[0]) == (way == "experts")
    assert tried_metrics == metrics
    assert are_equal(tried_content, content)


def test_the_tried_row_is_as_long_as_any_and_spares_no_token(tiny_model):
    for vocabulary in (7, 40, 151_936):
        row = longest_row(config_of(tiny_model), vocabulary=vocabulary, version=3)
        assert (row.lengths, row.tokens.length, row.tokens.loss_mask.sum()) == ([40, 40, 20], CAPACITY, CAPACITY - 3)
        assert len({int(row.tokens.ids[at]) for at in (0, 40, 80)}) == 3
        assert 0 <= row.tokens.ids.min() <= row.tokens.ids.max() < vocabulary
        assert np.all(row.tokens.versions == 3)
    # Where a model needs a mask to keep samples apart, several samples need the largest mask that any row needs.
    assert longest_row(config_of(tiny_model, micro_batch_tokens=40), vocabulary=128, version=0).lengths == [38, 2]


def test_a_tried_step_holds_all_that_a_later_one_holds(tiny_model, world):
    """When its forward pass begins: gradients of earlier rows, and the optimizer's state."""
    config = config_of(tiny_model)
    state = base_state(config, world)
    parameters, seen = list(state.model.parameters()), []
    state.model.base_model.register_forward_pre_hook(
        lambda *_: seen.append((sum(each.grad is not None for each in parameters), len(state.optimizer.state)))
    )
    try_step(Stepper(config, state, world))
    assert seen[-1] == (len(parameters), len(parameters))
    assert all(parameter.grad is None for parameter in parameters)
    assert not state.optimizer.state


def weights_after(model, world, logprob_log, *, lengths=(30, 20, 12, 40)) -> dict[str, torch.Tensor]:
    """The weights after one batch of two iterations."""
    state = base_state(config := config_of(model, num_iterations=2), world)
    reply = batch_reply(random_samples([*lengths]), world, capacity=64, step=0)
    Stepper(config, state, world, logprob_log=logprob_log).step(reply)
    if logprob_log is not None:
        logprob_log.write()
    return weights_of(state.model)


def test_logprobs_are_those_of_the_weights_before_the_step(tiny_model, tmp_path, world):
    watched = weights_after(tiny_model, world, LogprobLog(RunPaths(tmp_path), world))
    assert are_equal(watched, weights_after(tiny_model, world, None))
    known = read_logprobs(tmp_path / "logprobs", 0)
    model = base_state(config_of(tiny_model), world).model
    for sample in random_samples([30, 20, 12, 40]):
        found = logprobs_of(sample.tokens, known)
        assert found is not None
        expected = compute_columns(model, one_row([sample]), world.device).logprobs
        assert found[counting(sample.tokens)] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_batch_without_a_token_that_counts_leaves_an_empty_file(tiny_model, tmp_path, world):
    weights_after(tiny_model, world, LogprobLog(RunPaths(tmp_path), world), lengths=())
    assert [len(logprobs) for logprobs in read_logprobs(tmp_path / "logprobs", 0).values()] == [0]


def test_what_cannot_be_written_ends_nothing_and_of_a_team_one_rank_writes(tmp_path, world, caplog):
    (tmp_path / "logprobs").write_text("in the way")
    team: Any = SimpleNamespace(dp_rank=0, cp_rank=1)
    for folder, rank in ((tmp_path, world), (tmp_path / "team", team)):
        logprob_log = LogprobLog(RunPaths(folder), rank)
        for step in range(2):
            logprob_log.begin(batch_reply(random_samples([]), world, capacity=64, step=step))
            logprob_log.write()
    assert caplog.text.count("Could not write") == 1  # not once per step
    assert not (tmp_path / "team").exists()


def test_samples_that_differ_only_in_how_they_were_sampled_are_told_apart():
    sample = random_samples([12])[0].tokens
    columns = {name: getattr(sample, name) for name in ("ids", "loss_mask", "advantages", "versions")}
    assert identity(Tokens(**columns, logprobs=sample.logprobs + 0.5)) != identity(sample)
