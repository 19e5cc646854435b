"""The model as the trainer holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny import open_state, random_samples, weights_of
from trireme.algo.packing import micro_batches_of_rank
from trireme.base.errors import ConfigError
from trireme.config.trainer import TrainerModel
from trireme.trainer.mesh import World
from trireme.trainer.model import full_tensors, load_model, logits_at, num_parameters


def test_every_parameter_is_given_once_and_whole(tiny_model: Path, world: World) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = open_state(tiny_model, world).model
    found = dict(full_tensors(model, torch.float32))
    expected = dict(plain.named_parameters())
    assert list(found) == list(expected)
    assert "lm_head.weight" not in found  # tied
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert num_parameters(model) == sum(tensor.numel() for tensor in found.values())


def test_logits_are_computed_only_where_they_are_asked_for(tiny_model: Path, world: World) -> None:
    model = open_state(tiny_model, world).model
    (row,) = micro_batches_of_rank(random_samples([9, 14]), capacity=64, rank=0, world=1)
    with torch.no_grad():
        everywhere = logits_at(model, row, torch.arange(23), world.device)
        some = logits_at(model, row, torch.tensor([3, 20, 8]), world.device)
    assert everywhere.shape[0] == 23
    torch.testing.assert_close(some, everywhere[[3, 20, 8]], rtol=1e-5, atol=1e-6)


def test_from_scratch_weights_follow_from_the_seed(tiny_model: Path, world: World) -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(weights_of(load_model(TrainerModel(from_scratch=True), str(tiny_model), world)))
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[0])
    assert not torch.equal(drawn[0][name], drawn[2][name])


@pytest.mark.parametrize("config", [TrainerModel(), TrainerModel(from_scratch=True)], ids=["weights", "from_scratch"])
def test_a_model_that_cannot_be_had_is_a_question_of_configuration(
    tmp_path: Path, world: World, config: TrainerModel
) -> None:
    with pytest.raises(ConfigError, match=r"cannot be loaded(.|\n)*Set `model.name`"):
        load_model(config, str(tmp_path), world)
