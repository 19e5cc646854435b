"""The model as the trainer holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tiny import open_state, random_samples, weights_of
from trireme.algo.packing import micro_batches_of_rank
from trireme.base.errors import ConfigError
from trireme.config.trainer import TrainerModel
from trireme.trainer.forward import compute_columns
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model, num_parameters
from trireme.trainer.served import served_tensors


def test_every_parameter_is_given_once_and_whole(tiny_model: Path, world: World) -> None:
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    model = open_state(tiny_model, world).model
    found = dict(served_tensors(model, torch.float32))
    expected = dict(plain.named_parameters())
    assert list(found) == list(expected)
    assert "lm_head.weight" not in found  # tied
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert num_parameters(model) == sum(tensor.numel() for tensor in found.values())


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


def test_a_pass_without_gradients_leaves_each_rank_its_float32_parts(tiny_model: Path, world: World) -> None:
    """What is gathered, in bfloat16, would else be taken for the model by whoever saves or sends it."""
    config = TrainerModel(reshard_after_forward=False, optimization_dtype="bfloat16")
    model = load_model(config, str(tiny_model), world)
    (row,) = micro_batches_of_rank(random_samples([9, 14]), capacity=64, rank=0, world=1)
    assert are_sharded(model)
    with torch.no_grad():
        compute_columns(model, row, world.device)
    assert are_sharded(model)


def are_sharded(model: PreTrainedModel) -> bool:
    return all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in model.parameters())
