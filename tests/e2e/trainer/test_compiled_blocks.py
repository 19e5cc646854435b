"""Blocks that are compiled compute what they computed, with all that may be around them."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from support.models.families import build_config, row, save_family
from support.models.tiny import largest_difference, take_gradients
from trireme.algo.packing import unsampled_row
from trireme.config.trainer import ActivationCheckpointing, TrainerModel
from trireme.trainer.model.forward import scorer_of
from trireme.trainer.model.model import load_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ac", [None, ActivationCheckpointing()], ids=["kept", "recomputed"])
def test_compiled_blocks_have_the_gradients_of_plain_ones(tmp_path, world, ac):
    folder = save_family(tmp_path, build_config("qwen3"))
    everything = {"compile": True, "activation_offload": True, "ac": ac}
    plain = load_model(TrainerModel(), str(folder), world)
    compiled = load_model(TrainerModel().model_copy(update=everything), str(folder), world)
    scorers = [scorer_of(model, world.device) for model in (plain, compiled)]
    assert all(scorer.is_packed for scorer in scorers)
    torch.compiler.reset()  # what was compiled to try whether samples can be packed
    counters.clear()
    for lengths in ((9, 14), (20, 3, 6)):
        ids, targets = row(*lengths)[0][0].tolist(), np.arange(1, sum(lengths))
        for scorer in scorers:
            scorer.score(unsampled_row(ids, list(lengths)), targets, world.device).logprobs.sum().backward()
        assert largest_difference(take_gradients(plain), take_gradients(compiled)) < 1e-5
    assert counters["stats"]["unique_graphs"] > 0
