"""Four processes that train as one, two and four ranks in different orders, for `test_teams`: ranks that share rows,
and copies of the model.

RANK=0..3 MASTER_ADDR=127.0.0.1 PORTS=a,b,c,… python tests/teams.py MODELS_FOLDER OUTPUT_FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny
from rank_processes import stages_of_this_rank
from trireme.algo.packing import empty_micro_batch, micro_batches_of_rank
from trireme.base.errors import ConfigError
from trireme.config.run import Model, RunConfig
from trireme.config.trainer import ActivationCheckpointing, Loss, Optimizer, TrainerConfig, TrainerModel
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.model import load_model
from trireme.trainer.parallel.mesh import World, open_world
from trireme.trainer.step import Stepper, base_state, forward_backward, policy_gradient

CAPACITY = 50
LENGTHS = [40, 30, 18, 33, 15, 44, 20, 9, 13]
LOSSES = {
    "importance": Loss(kl_tau=0.1),
    "sequences": Loss(type="gspo", clip_low=0.5, clip_high=2.0, normalize="sequence"),
    "entropy": Loss(type="ppo", normalize="sequence", entropy_bonus=0.1),
}


class Stage(NamedTuple):
    name: str
    ranks: int = 1
    replicas: int = 1
    cp: int = 1
    model: str = "qwen3"
    ac: ActivationCheckpointing | None = None


STAGES = (
    Stage("team", 2, cp=2, ac=ActivationCheckpointing()),
    Stage("windows", 2, cp=2, model="mistral"),
    Stage("team_of_four", 4, cp=4),
    Stage("two_teams", 4, cp=2, ac=ActivationCheckpointing(mode="selective")),
    Stage("copies", 4, replicas=2),
    Stage("copies_of_teams", 4, replicas=2, cp=2),
)
EXPECTED = {"qwen3": Stage("alone"), "mistral": Stage("alone_with_windows", model="mistral")}


def save_models(folder: Path) -> None:
    """Eight heads of two keys; the other model looks back 12 tokens only."""
    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder / "qwen3")
    MistralForCausalLM(MistralConfig(**sizes, sliding_window=12)).save_pretrained(folder / "mistral")


def run(stage: Stage, models: Path, folder: Path, world: World) -> dict[str, Any]:
    config = TrainerModel(ac=stage.ac, head_chunk=16, cp=stage.cp, dp_replicate=stage.replicas)
    model = load_model(config, str(models / stage.model), world)
    return {
        "gradients": {name: gradients(model, loss, world) for name, loss in LOSSES.items()},
        "empty": logprobs_of_an_empty_row(model, world),
        "trained": train(config, str(models / stage.model), folder, world),
    }


def gradients(model: Any, loss: Loss, world: World) -> dict[str, Any]:
    samples = tiny.random_samples(LENGTHS, seed=0)
    metrics = forward_backward(
        model,
        micro_batches_of_rank(samples, capacity=CAPACITY, rank=world.dp_rank, world=world.dp_size),
        loss_tokens=tiny.num_loss_tokens(samples),
        loss_samples=tiny.num_loss_samples(samples),
        step=0,
        loss_function=policy_gradient(loss),
        world=world,
        entropy_gradient=loss.entropy_bonus is not None,
    )
    return {"metrics": metrics, "gradients": tiny.take_gradients(model)}


def logprobs_of_an_empty_row(model: Any, world: World) -> list[bool]:
    """Fewer tokens than ranks."""
    columns = compute_columns(model, empty_micro_batch(), world.device)
    columns.logprobs.sum().backward()
    model.zero_grad(set_to_none=True)
    return columns.mask.tolist()


def train(model: TrainerModel, name: str, folder: Path, world: World) -> dict[str, Any]:
    """Two steps of two iterations with a reference model, and what a checkpoint of them brings back."""
    loss = Loss(type="decoupled", correction="sequence_truncate", normalize="sequence", beta=0.2, kl_estimator="k2")
    optim = Optimizer(lr=1e-3)
    trainer = TrainerConfig(model=model, optim=optim, num_iterations=2, loss=loss)
    config = RunConfig(model=Model(name=name), trainer=trainer)
    state = base_state(config, world)
    stepper = Stepper(config, state, world)
    metrics = [stepper.step(reply(step, world)) for step in range(2)]
    store = tiny.open_store(folder / "checkpoints", world)
    store.save(state)
    store.wait()
    loaded = base_state(config, world)
    store.resume(loaded, resume=True)
    pairs = zip(tiny.content_of(state).items(), tiny.content_of(loaded).items(), strict=True)
    is_back = all(one == other and torch.equal(saved, read) for (one, saved), (other, read) in pairs)
    return {"metrics": metrics, "weights": tiny.weights_of(state.model), "is_back": is_back}


def reply(step: int, world: World) -> Any:
    samples = tiny.random_samples(LENGTHS, seed=step)
    given = tiny.batch_reply(samples, world, capacity=CAPACITY, step=step)
    rows = micro_batches_of_rank(samples, capacity=CAPACITY, rank=world.dp_rank, world=world.dp_size)
    return msgspec.structs.replace(given, micro_batches=rows)


def refusals(models: Path, world: World) -> list[str]:
    """Of a model that a team cannot share."""
    model = load_model(TrainerModel(attn="eager", cp=2), str(models / "qwen3"), world)
    try:
        compute_columns(model, empty_micro_batch(), world.device)
    except ConfigError as error:
        return [str(error)]
    return []


def main() -> None:
    models, folder = map(Path, sys.argv[1:])
    for stage in stages_of_this_rank(STAGES, folder):
        with open_world("cpu", threads=1, timeout_s=240, replicas=stage.replicas, cp=stage.cp) as world:
            result = run(stage, models, folder / stage.name, world)
            if stage.name == "team":
                result["refusals"] = refusals(models, world)
            torch.save(result, folder / f"{stage.name}_{world.rank}.pt")
            world.barrier()


if __name__ == "__main__":
    main()
    os._exit(0)  # as the trainer does, and why, see `run_command`
