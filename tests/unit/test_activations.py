"""However little a block keeps for its backward pass, the gradients are the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from families import ATTENTION, backward, build_config, row, save_family
from tiny import are_equal, largest_difference, take_gradients
from trireme.config.trainer import ActivationCheckpointing, TrainerModel
from trireme.trainer import activations
from trireme.trainer.activations import Offload
from trireme.trainer.mesh import World
from trireme.trainer.model import load_model

KINDS = ("qwen3", "gpt_oss", "qwen3_moe")

WAYS = {
    "full": {"ac": ActivationCheckpointing()},
    "every other": {"ac": ActivationCheckpointing(freq=2)},
    "selective": {"ac": ActivationCheckpointing(mode="selective")},
    "offload": {"activation_offload": True},
    "offload of what full keeps": {"ac": ActivationCheckpointing(), "activation_offload": True},
    "offload of what selective keeps": {"ac": ActivationCheckpointing(mode="selective"), "activation_offload": True},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("activations")
    return {kind: save_family(root / kind, build_config(kind, num_hidden_layers=3)) for kind in KINDS}


@pytest.fixture(autouse=True)
def _small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "OFFLOADED_BYTES", 1)


def gradients(folder: Path, kind: str, world: World, **settings: object) -> dict[str, torch.Tensor]:
    """Of the second of two micro-batches, whose activations must not be mistaken for those of the first."""
    config = TrainerModel(attn=ATTENTION.get(kind, "sdpa")).model_copy(update=settings)
    model = load_model(config, str(folder), world)
    backward(model, *row(5, 8, seed=1))
    take_gradients(model)
    backward(model, *row(9, 14))
    return take_gradients(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same(checkpoints: dict[str, Path], kind: str, way: str, world: World) -> None:
    """To the bit, but for tensors that come back from CPU memory in another layout, whose products round otherwise."""
    expected = gradients(checkpoints[kind], kind, world)
    found = gradients(checkpoints[kind], kind, world, **WAYS[way])
    assert are_equal(found, expected) or ("offload" in way and largest_difference(found, expected) < 1e-5)


class Operations(TorchDispatchMode):
    """How often each operation is done."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_full_computes_blocks_twice_every_other_fewer_and_selective_no_matrix_product(
    checkpoints: dict[str, Path], world: World
) -> None:
    mm, rsqrt = {}, {}
    for name in ("plain", "selective", "every other", "full"):
        model = load_model(TrainerModel().model_copy(update=WAYS.get(name, {})), str(checkpoints["qwen3"]), world)
        backward(model, *row(23))
        with Operations() as done:
            backward(model, *row(23))
        mm[name], rsqrt[name] = done.counts["aten::mm"], done.counts["aten::rsqrt"]
    assert mm["selective"] == mm["plain"] < mm["every other"] < mm["full"]
    assert rsqrt["selective"] == rsqrt["full"] > rsqrt["every other"] > rsqrt["plain"]


def test_only_activations_of_some_size_are_moved_and_each_once() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    inputs = torch.randn(8, 64, requires_grad=True)
    offload = Offload(torch.device("cpu"), smallest_bytes=8 * 64 * 4)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        twice = layer(hidden) + torch.nn.functional.linear(hidden, layer.weight)  # both save their input
        return twice * torch.ones(64)  # of which 64 numbers are saved

    moved = offload.around(forward, layer, is_first=True)(inputs)
    assert offload.num_bytes == inputs.nbytes
    assert torch.equal(*(torch.autograd.grad(each.sum(), inputs)[0] for each in (moved, forward(inputs))))
    with torch.no_grad():  # no backward pass needs them
        offload.around(forward, layer, is_first=True)(inputs)
    assert offload.num_bytes == inputs.nbytes
