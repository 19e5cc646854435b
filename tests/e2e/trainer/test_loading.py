"""Two ranks hold half of a model each, read half of its files each, and compute what one rank computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM

from support.models import tiny
from support.models.families import backward, build_config, logits, row, save_family
from support.models.live_bytes import LiveBytes
from support.models.low_bit import LOW_BIT, save_low_bit
from support.models.moe import routed, save_moe
from support.models.tiny import are_equal, largest_difference, random_samples, take_gradients, weights_of
from support.processes.rank_processes import run_rank, run_ranks
from trireme.config.trainer import ActivationCheckpointing, Experts, TrainerModel
from trireme.trainer.model import loading
from trireme.trainer.model import model as model_module
from trireme.trainer.model.model import load_model
from trireme.trainer.model.moe import expert_metrics
from trireme.trainer.parallel.mesh import World, build_world

KINDS = ("qwen3", "gemma2", "qwen3_moe", "gpt_oss")
LARGE = {"vocab_size": 4000, "hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 4}
READ_BYTES = 1 << 18

WAYS: dict[str, dict[str, Any]] = {
    "kept whole between passes": {"reshard_after_forward": False}, "in CPU memory": {"fsdp_cpu_offload": True},
    "recomputed and offloaded": {"ac": ActivationCheckpointing(mode="selective"), "activation_offload": True},
    "two copies": {"dp_replicate": 2}, "bfloat16": {"optimization_dtype": "bfloat16"},
    "bfloat16, summed in it": {"optimization_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
}  # fmt: skip


def run(folder: Path, world: World) -> dict[str, Any]:
    models = {kind: compute(folder / kind, world) for kind in KINDS}
    ways = {name: compute(folder / "qwen3", world, **settings) for name, settings in WAYS.items()}
    torch.manual_seed(3)
    drawn = load_model(TrainerModel(from_scratch=True), str(folder / "qwen3_moe"), world)
    low = {kind: load_model(TrainerModel(attn="eager"), str(folder / f"low_{kind}"), world) for kind in LOW_BIT}
    weights = {"drawn": weights_of(drawn)} | {kind: weights_of(model) for kind, model in low.items()}
    mixtures = {cp: train_mixture(folder / "mixture", world, cp) for cp in {1, world.size}}
    large = load_large(folder / "large", world)
    return {"models": models, "ways": ways, "weights": weights, "mixtures": mixtures, "large": large}


def divided(world: World, *, replicas: int = 1, cp: int = 1) -> World:
    return build_world(world.rank, world.size, world.device, replicas=replicas, cp=cp)


def compute(folder: Path, world: World, **settings: Any) -> dict[str, Any]:
    config = TrainerModel().model_copy(update=settings)
    model = load_model(config, str(folder), divided(world, replicas=min(world.size, config.dp_replicate)))
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    with torch.no_grad():
        found = logits(model, *row(9, 14))
    backward(model, *row(9, 14))
    share = held / sum(parameter.numel() for parameter in model.parameters())
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    return {"held": share, "dtypes": sorted(dtypes), "logits": found, "gradients": take_gradients(model)}


def train_mixture(folder: Path, world: World, cp: int) -> dict[str, Any]:
    """Where `cp` ranks share a row, and tokens go where the engine sent them."""
    world = divided(world, cp=cp)
    config = TrainerModel(cp=cp, ac=ActivationCheckpointing(), moe=Experts(router_replay=True))
    model = load_model(config, str(folder), world)
    metrics = tiny.backward(model, routed(random_samples([31, 18, 23, 9])), world, capacity=41)
    return {"metrics": metrics | expert_metrics(model), "gradients": take_gradients(model)}


def load_large(folder: Path, world: World) -> dict[str, int]:
    """Bytes: of this rank's parameters, read from files, read at once, alive at once. Without the pass on which the
    model is tried out, which gathers blocks as training does."""
    reads: list[int] = []
    read = loading.PublishedFiles.read

    def counted(files: loading.PublishedFiles, name: str, region: Any) -> torch.Tensor:
        with _disable_current_modes():  # what is read is a view of the file, which is mapped and takes no memory
            tensor = read(files, name, region)
        reads.append(tensor.nbytes)
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_module, "check_packing", lambda *_: None)
        patched.setattr(loading.PublishedFiles, "read", counted)
        patched.setattr(loading, "READ_BYTES", READ_BYTES)
        with LiveBytes() as loading_peak:
            model = load_model(TrainerModel(), str(folder), world)
        held = sum(parameter.to_local().nbytes for parameter in model.parameters())
        del model
        with LiveBytes() as drawing_peak:
            load_model(TrainerModel(from_scratch=True), str(folder), world)
    peaks = {"peak": loading_peak.peak, "peak_of_drawing": drawing_peak.peak}
    return {"held": held, "read": sum(reads), "largest_read": max(reads)} | peaks


@torch.no_grad()
def plain_logits(folder: Path) -> torch.Tensor:
    """Of each sample alone, in transformers' own model."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    apart = zip(*(each.split((9, 14), 1) for each in row(9, 14)), strict=True)
    return torch.cat([logits(plain, *each) for each in apart])


def test_two_ranks_compute_the_model_that_one_rank_computes(tmp_path, world):
    for kind in KINDS:
        save_family(tmp_path / kind, build_config(kind))
    for kind, changes in LOW_BIT.items():
        save_low_bit(tmp_path / f"low_{kind}", build_config(kind, **changes))
    save_family(tmp_path / "large", build_config("llama", **LARGE))
    save_moe(tmp_path / "mixture", num_key_value_heads=2)
    alone, together = run(tmp_path, world), run_ranks(__file__, tmp_path)
    for kind in KINDS:
        expected = plain_logits(tmp_path / kind)
        for found in (rank["models"][kind] for rank in together):
            assert found["held"] == pytest.approx(0.5, abs=0.01)
            torch.testing.assert_close(found["logits"], expected, rtol=1e-4, atol=2e-5)
            assert largest_difference(alone["models"][kind]["gradients"], found["gradients"]) < 1e-5
    for way in WAYS:
        one, other = (rank["ways"][way] for rank in together)
        for found in (one, other):
            assert found["held"] == pytest.approx(1.0 if way == "two copies" else 0.5, abs=0.01)
            assert found["dtypes"] == ["torch.float32"]
            assert {gradient.dtype for gradient in found["gradients"].values()} == {torch.float32}
            difference = largest_difference(alone["models"]["qwen3"]["gradients"], found["gradients"])
            assert 1e-4 < difference < 0.2 if "bfloat16" in way else difference < 1e-5, way
        assert "bfloat16" not in way or are_equal(one["gradients"], other["gradients"])
    check_mixtures(alone["mixtures"][1], *(rank["mixtures"] for rank in together))
    for rank in together:  # a rank reads a little at a time, and needs no more memory than it holds
        assert all(are_equal(rank["weights"][name], tensors) for name, tensors in alone["weights"].items())
        sizes, total = rank["large"], alone["large"]["held"]
        assert sizes["held"] == sizes["read"] == pytest.approx(total / 2, rel=0.01)
        assert sizes["largest_read"] <= READ_BYTES < total / 64
        assert sizes["peak"] < min(sizes["held"] + 4 * READ_BYTES, 1.1 * sizes["held"])
        assert sizes["peak_of_drawing"] < sizes["held"] + 3 * 4 * 4000 * 256  # its largest matrix, the embedding


def check_mixtures(alone: dict[str, Any], first: dict[int, Any], second: dict[int, Any]) -> None:
    assert alone["metrics"]["moe/rerouted_frac"] > 0.5
    for cp, found in first.items():
        assert found["metrics"] == second[cp]["metrics"]
        for name in ("loss", "mismatch_kl", "moe/rerouted_frac", "moe/busiest_expert", "moe/idle_experts_frac"):
            padding = 0.1 if name.startswith("moe") and cp > 1 else 0  # a part may be longer than its tokens
            expected = pytest.approx(alone["metrics"][name], rel=1e-5 + padding, abs=1e-7)
            assert found["metrics"][name] == expected, name
        torch.testing.assert_close(found["gradients"], alone["gradients"], rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    run_rank(run)
