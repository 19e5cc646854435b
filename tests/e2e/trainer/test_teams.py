"""However ranks are divided into teams that share rows and copies of the model, it is the same training."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny
from rank_processes import require_success, run_stages, stage_results, started_ranks
from trireme.algo.packing import unsampled_row
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import ActivationCheckpointing, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World
from trireme.trainer.step import base_state

pytestmark = pytest.mark.slow

CAPACITY = 50
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]
LOSSES = {
    "importance": Loss(kl_tau=0.1), "sequences": Loss(type="gspo", clip_low=0.5, clip_high=2.0, normalize="sequence"),
    "entropy": Loss(type="ppo", normalize="sequence", entropy_bonus=0.1),
}  # fmt: skip


class Stage(NamedTuple):
    name: str
    ranks: int = 1
    replicas: int = 1
    cp: int = 1
    model: str = "qwen3"
    ac: ActivationCheckpointing | None = None


STAGES = (
    Stage("windows", 2, cp=2, model="mistral"),
    Stage("team_of_four", 4, cp=4, ac=ActivationCheckpointing()),
    Stage("copies_of_teams", 4, replicas=2, cp=2, ac=ActivationCheckpointing(mode="selective")),
)
EXPECTED = {"qwen3": Stage("alone"), "mistral": Stage("alone_with_windows", model="mistral")}


def save_models(folder: Path) -> None:
    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "qwen3")
    MistralForCausalLM(MistralConfig(**sizes, sliding_window=12)).save_pretrained(folder / "mistral")


def run(stage: Stage, models: Path, world: World) -> dict[str, Any]:
    config = TrainerModel(ac=stage.ac, head_chunk=16, cp=stage.cp, dp_replicate=stage.replicas)
    model = load_model(config, str(models / stage.model), world)
    return {
        "gradients": {
            name: (
                tiny.backward(model, tiny.random_samples(LENGTHS), world, capacity=CAPACITY, loss=loss),
                tiny.take_gradients(model),
            )
            for name, loss in LOSSES.items()
        },
        "empty": logprobs_of_an_empty_row(model, world),
        "trained": train(config, str(models / stage.model), world),
    }


def logprobs_of_an_empty_row(model: Any, world: World) -> list[bool]:
    columns = compute_columns(model, unsampled_row([0], [1]), world.device)
    columns.logprobs.sum().backward()
    model.zero_grad(set_to_none=True)
    return columns.mask.tolist()


def train(model: TrainerModel, name: str, world: World) -> dict[str, Any]:
    loss = Loss(type="decoupled", correction="sequence_truncate", normalize="sequence", beta=0.2, kl_estimator="k2")
    optim = Optimizer(lr=1e-3)
    trainer = TrainerConfig(model=model, optim=optim, num_iterations=2, loss=loss)
    config = RunConfig(model=Model(name=name), trainer=trainer)
    state = base_state(config, world)
    metrics = tiny.train(config, state, world, until=2, lengths=LENGTHS, capacity=CAPACITY)
    return {"metrics": metrics, "weights": tiny.weights_of(state.model)}


def test_ranks_however_divided_train_as_one(tmp_path: Path, world: World) -> None:
    save_models(tmp_path)
    with started_ranks(__file__, tmp_path, tmp_path, count=4, num_ports=len(STAGES)) as processes:
        alone = {model: run(stage, tmp_path, world) for model, stage in EXPECTED.items()}
        require_success(processes)
    found = stage_results(STAGES, tmp_path)
    for stage in STAGES:
        expected, ranks = alone[stage.model], found[stage.name]
        first = ranks[0]["trained"]["weights"]
        for rank in ranks:
            for loss in LOSSES:
                (ours, gradient), (theirs, right) = rank["gradients"][loss], expected["gradients"][loss]
                assert tiny.largest_difference(right, gradient) < 1e-5, (stage, loss)
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), (stage, loss)
            trained = rank["trained"]
            assert all(torch.equal(first[name], trained["weights"][name]) for name in first), stage
            assert tiny.largest_difference(expected["trained"]["weights"], trained["weights"]) < 1e-3, stage
            for ours, theirs in zip(trained["metrics"], expected["trained"]["metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), stage
            assert rank["empty"] == [False], f"a row of fewer tokens than ranks, in {stage}"


if __name__ == "__main__":
    models, folder = map(Path, sys.argv[1:])
    run_stages(STAGES, lambda stage, world: run(stage, models, world), folder)
