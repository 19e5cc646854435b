"""Two ranks hold half of a model each, read half of its files each, and compute what one rank computes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoModelForCausalLM

from families import ATTENTION, backward, build_config, logits, row, save_family
from rank_processes import run_rank, run_ranks
from tiny import are_equal, largest_difference, take_gradients, weights_of
from trireme.config.trainer import ActivationCheckpointing, TrainerModel
from trireme.trainer import loading
from trireme.trainer import model as model_module
from trireme.trainer.mesh import World, _world
from trireme.trainer.model import load_model

pytestmark = pytest.mark.e2e  # real ranks beside one another

KINDS = ("qwen3", "gemma2", "qwen3_moe", "gpt_oss")
LARGE = {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 4}
READ_BYTES = 1 << 18

WAYS: dict[str, dict[str, Any]] = {
    "kept whole between passes": {"reshard_after_forward": False},
    "in CPU memory": {"fsdp_cpu_offload": True},
    "recomputed and offloaded": {"ac": ActivationCheckpointing(mode="selective"), "activation_offload": True},
    "two copies": {"dp_replicate": 2},
    "bfloat16": {"optimization_dtype": "bfloat16"},
    "bfloat16, summed in it": {"optimization_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
}


class Peak(TorchDispatchMode):
    """Bytes of tensors that were alive at once, each memory counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self._alive: dict[int, list[int]] = {}  # by memory: its size, and how many tensors look at it

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (list, tuple)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return output

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or not tensor.nbytes:
            return
        storage = tensor.untyped_storage()
        self._alive.setdefault(storage.data_ptr(), [storage.nbytes(), 0])[1] += 1
        weakref.finalize(tensor, self._drop, storage.data_ptr())
        self.num_bytes = max(self.num_bytes, sum(size for size, _ in self._alive.values()))

    def _drop(self, memory: int) -> None:
        self._alive[memory][1] -= 1
        if not self._alive[memory][1]:
            del self._alive[memory]


def run(folder: Path, world: World) -> dict[str, Any]:
    models = {kind: compute(folder / kind, world, attn=ATTENTION.get(kind, "sdpa")) for kind in KINDS}
    ways = {name: compute(folder / "qwen3", world, **settings) for name, settings in WAYS.items()}
    torch.manual_seed(3)
    drawn = load_model(TrainerModel(from_scratch=True), str(folder / "qwen3_moe"), world)
    return {"models": models, "ways": ways, "drawn": weights_of(drawn), "large": load_large(folder / "large", world)}


def compute(folder: Path, world: World, **settings: Any) -> dict[str, Any]:
    config = TrainerModel().model_copy(update=settings)
    if world.size > 1 and config.dp_replicate > 1:
        world = _world(world.rank, world.size, world.device, replicas=config.dp_replicate, cp=1)
    model = load_model(config, str(folder), world)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    with torch.no_grad():
        found = logits(model, *row(9, 14))
    backward(model, *row(9, 14))
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    return {
        "held": held / sum(parameter.numel() for parameter in model.parameters()),
        "dtypes": sorted(dtypes),
        "logits": found,
        "gradients": take_gradients(model),
    }


def load_large(folder: Path, world: World) -> dict[str, int]:
    """Bytes: of this rank's parameters, read from files, read at once, alive at once. Without the pass on which the
    model is tried out, which gathers blocks as training does."""
    model_module.require_packable = lambda *_: None
    reads: list[int] = []
    read = loading.PublishedFiles.read

    def counted(files: loading.PublishedFiles, name: str, region: Any) -> torch.Tensor:
        with _disable_current_modes():  # what is read is a view of the file, which is mapped and takes no memory
            tensor = read(files, name, region)
        reads.append(tensor.nbytes)
        return tensor.clone()

    loading.PublishedFiles.read, loading.READ_BYTES = counted, READ_BYTES  # type: ignore[method-assign]
    loading_peak, drawing_peak = Peak(), Peak()
    with loading_peak:
        model = load_model(TrainerModel(), str(folder), world)
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    del model
    with drawing_peak:
        load_model(TrainerModel(from_scratch=True), str(folder), world)
    peaks = {"peak": loading_peak.num_bytes, "peak_of_drawing": drawing_peak.num_bytes}
    return {"held": held, "read": sum(reads), "largest_read": max(reads)} | peaks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    for kind in KINDS:
        save_family(folder / kind, build_config(kind))
    save_family(folder / "large", build_config("llama", **LARGE))
    return folder


@pytest.fixture(scope="module")
def together(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(__file__, folder)


@pytest.fixture(scope="module")
def alone(folder: Path, world: World) -> dict[str, Any]:
    return run(folder, world)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hold_half_each_and_compute_the_model(
    together: list[dict[str, Any]], alone: dict[str, Any], folder: Path, kind: str
) -> None:
    attention = ATTENTION.get(kind, "sdpa")
    plain = AutoModelForCausalLM.from_pretrained(folder / kind, dtype=torch.float32, attn_implementation=attention)
    ids, positions = row(9, 14)
    with torch.no_grad():
        apart = zip(ids.split((9, 14), 1), positions.split((9, 14), 1), strict=True)
        expected = torch.cat([logits(plain, *each) for each in apart])
    for rank in together:
        found = rank["models"][kind]
        assert found["held"] == pytest.approx(0.5, abs=0.01)
        torch.testing.assert_close(found["logits"], expected, rtol=1e-4, atol=2e-5)
        assert largest_difference(alone["models"][kind]["gradients"], found["gradients"]) < 1e-5


@pytest.mark.parametrize("way", [way for way in WAYS if "bfloat16" not in way])
def test_how_parameters_and_activations_are_held_changes_no_gradient(
    together: list[dict[str, Any]], alone: dict[str, Any], way: str
) -> None:
    for rank in together:
        found = rank["ways"][way]
        assert found["held"] == pytest.approx(1.0 if way == "two copies" else 0.5, abs=0.01)
        assert largest_difference(alone["models"]["qwen3"]["gradients"], found["gradients"]) < 1e-5


@pytest.mark.parametrize("way", [way for way in WAYS if "bfloat16" in way])
def test_in_half_precision_parameters_and_gradients_stay_float32(
    together: list[dict[str, Any]], alone: dict[str, Any], way: str
) -> None:
    for rank in together:
        found = rank["ways"][way]
        assert found["dtypes"] == ["torch.float32"]
        assert {gradient.dtype for gradient in found["gradients"].values()} == {torch.float32}
        assert 1e-4 < largest_difference(alone["models"]["qwen3"]["gradients"], found["gradients"]) < 0.2
    one, other = (rank["ways"]["bfloat16, summed in it"]["gradients"] for rank in together)
    assert are_equal(one, other)


def test_a_rank_reads_or_draws_its_half_of_the_same_weights_a_little_at_a_time_and_needs_no_more_memory(
    together: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert all(are_equal(rank["drawn"], alone["drawn"]) for rank in together)
    total = alone["large"]["held"]
    assert total > 16 << 20
    for rank in together:
        sizes = rank["large"]
        assert sizes["held"] == sizes["read"] == pytest.approx(total / 2, rel=0.01)
        assert sizes["largest_read"] <= READ_BYTES
        assert sizes["peak"] < sizes["held"] + 4 * READ_BYTES
        assert sizes["peak"] < 1.1 * sizes["held"]
        assert sizes["peak_of_drawing"] < sizes["held"] + 3 * 4 * 4000 * 256  # its largest matrix, the embedding


if __name__ == "__main__":
    run_rank(run)
