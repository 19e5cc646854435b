"""However little a block keeps for its backward pass, the gradients are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


def saved_bytes(folder: Path, world: World, **settings: object) -> int:
    """What the backward pass of three blocks keeps beside parameters, each memory counted once."""
    model = load_model(TrainerModel().model_copy(update=settings), str(folder), world)
    parameters = {parameter.to_local().untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backward(model, *row(40))
    return sum(kept.values())


def test_full_keeps_the_inputs_of_blocks_and_every_other_keeps_more(checkpoints: dict[str, Path], world: World) -> None:
    plain, other, full = (
        saved_bytes(checkpoints["qwen3"], world, **settings) for settings in ({}, WAYS["every other"], WAYS["full"])
    )
    assert full < other < plain


def counted(operations: dict[str, int]) -> torch.utils._python_dispatch.TorchDispatchMode:
    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            operations[function.name()] = operations.get(function.name(), 0) + 1
            return function(*args, **(kwargs or {}))

    return Counted()


def test_selective_computes_no_matrix_product_twice(checkpoints: dict[str, Path], world: World) -> None:
    found: dict[str, dict[str, int]] = {}
    for name in ("plain", "selective", "full"):
        model = load_model(TrainerModel().model_copy(update=WAYS.get(name, {})), str(checkpoints["qwen3"]), world)
        backward(model, *row(23))
        with counted(found.setdefault(name, {})):
            backward(model, *row(23))
    assert found["selective"]["aten::mm"] == found["plain"]["aten::mm"] < found["full"]["aten::mm"]
    assert found["selective"]["aten::rsqrt"] == found["full"]["aten::rsqrt"] > found["plain"]["aten::rsqrt"]


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


def test_nothing_is_moved_where_there_is_no_backward_pass() -> None:
    layer = torch.nn.Linear(64, 64)
    offload = Offload(torch.device("cpu"), smallest_bytes=1)
    with torch.no_grad():
        offload.around(layer.forward, layer, is_first=True)(torch.randn(8, 64))
    assert offload.num_bytes == 0
