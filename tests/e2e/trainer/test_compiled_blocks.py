"""Blocks that are compiled compute what they computed, with all that may be around them."""

from pathlib import Path

import pytest
import torch

from families import backward, build_config, logits, row, save_family
from tiny import largest_difference, take_gradients
from trireme.config.trainer import ActivationCheckpointing, TrainerModel
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("compiled"), build_config("mistral"))


def test_compiled_blocks_have_the_gradients_of_plain_ones(folder: Path, world: World) -> None:
    everything = {"compile": True, "activation_offload": True, "ac": ActivationCheckpointing(mode="selective")}
    plain = load_model(TrainerModel(), str(folder), world)
    compiled = load_model(TrainerModel().model_copy(update=everything), str(folder), world)
    for lengths in ((9, 14), (20, 3, 6)):
        for model in (plain, compiled):
            backward(model, *row(*lengths))
        assert largest_difference(take_gradients(plain), take_gradients(compiled)) < 1e-5


def test_flex_attention_computes_what_sdpa_does(folder: Path, world: World) -> None:
    """Forward only: its backward pass runs on GPUs. With windows of 5 tokens."""
    ids, positions = row(9, 14)
    with torch.no_grad():
        found, expected = (
            logits(load_model(TrainerModel(attn=name), str(folder), world), ids, positions)
            for name in ("flex_attention", "sdpa")
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
