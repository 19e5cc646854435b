"""A tiny model and batches for it: what the trainer's tests train."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import msgspec
import numpy as np
import torch
from safetensors.numpy import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.config.trainer import Checkpoints, Loss, Optimizer, TrainerModel
from trireme.messages import BatchReply, MicroBatch, TopLogprobs, build_tokens
from trireme.trainer.checkpoint.checkpoint import CheckpointStore
from trireme.trainer.checkpoint.export import Exporter
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.model import load_model
from trireme.trainer.optim.optimizer import build_optimizer
from trireme.trainer.parallel.mesh import World
from trireme.trainer.step import Stepper, forward_backward, policy_gradient, update
from trireme.trainer.tokenizer import open_tokenizer

VOCABULARY = 128


def load_script(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_tiny_model(folder: Path, *, hidden: int = 64, layers: int = 2) -> Path:
    script = load_script("make_tiny_model")
    tokenizer = script.build_tokenizer()
    torch.manual_seed(0)
    script.build_model(tokenizer, hidden, layers).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def random_samples(lengths: list[int], seed: int = 0) -> list[Sample]:
    """Prompts and answers of random tokens, sampled by a policy that is off by some, at several temperatures."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in lengths:
        mask = np.arange(length) >= max(1, length // 3)
        tokens = build_tokens(
            ids=rng.integers(0, VOCABULARY, length), loss_mask=mask,
            logprobs=np.where(mask, rng.normal(-4.9, 1.5, length), 0.0), advantages=np.where(mask, rng.normal(), 0.0),
            versions=np.where(mask, rng.integers(0, 2, length), -1),
        )  # fmt: skip
        samples.append(Sample(tokens, float(rng.choice([0.7, 1.0, 1.3]))))
    return samples


def one_row(samples: list[Sample]) -> MicroBatch:
    (row,) = micro_batches_of_rank(samples, capacity=sum(sample.tokens.length for sample in samples), rank=0, world=1)
    return row


def num_loss_tokens(samples: list[Sample]) -> int:
    return sum(int(sample.tokens.loss_mask.sum()) for sample in samples)


def with_likeliest(sample: Sample) -> tuple[Sample, list[dict[int, float]]]:
    """Return the sample with up to three likely tokens at each sampled place; and these, with their logprobs."""
    tops: list[dict[int, float]] = []
    for place, (token, is_sampled) in enumerate(zip(sample.tokens.ids, sample.tokens.loss_mask, strict=True)):
        count = 1 + place % 3 if is_sampled else 0
        tops.append({(int(token) + 5 * n) % VOCABULARY: -1.0 - n - place for n in range(count)})
    counts, ids = [len(top) for top in tops], [token for top in tops for token in top]
    values = np.array([value for top in tops for value in top.values()], np.float32)
    listed = TopLogprobs(np.array(counts, np.int32), np.array(ids, np.int32), values)
    return replace(sample, tokens=msgspec.structs.replace(sample.tokens, top_logprobs=listed)), tops


def num_loss_samples(samples: list[Sample]) -> int:
    return sum(bool(sample.tokens.loss_mask.any()) for sample in samples)


def open_state(folder: Path, world: World, *, attn: str = "sdpa", lr: float = 1e-3) -> TrainerState:
    model = load_model(TrainerModel(attn=attn), str(folder), world)
    return TrainerState(model=model, optimizer=build_optimizer(model, Optimizer(lr=lr, weight_decay=0.1)))


def backward(
    model: PreTrainedModel,
    samples: list[Sample],
    world: World,
    *,
    capacity: int,
    step: int = 0,
    loss: Loss | None = None,
) -> dict[str, float]:
    reply, loss = batch_reply(samples, world, capacity=capacity, step=step), loss or Loss(type="importance", kl_tau=0.1)
    return forward_backward(
        model, reply.micro_batches, loss_tokens=reply.loss_tokens, loss_samples=reply.loss_samples, step=step,
        loss_function=policy_gradient(loss), world=world, entropy_gradient=loss.entropy_bonus is not None,
    )  # fmt: skip


def batch_reply(samples: list[Sample], world: World, *, capacity: int, step: int) -> BatchReply:
    return BatchReply(
        step=step,
        micro_batches=micro_batches_of_rank(samples, capacity=capacity, rank=world.dp_rank, world=world.dp_size),
        loss_tokens=num_loss_tokens(samples), num_rollouts=len(samples), loss_samples=num_loss_samples(samples),
    )  # fmt: skip


def train_step(state: TrainerState, samples: list[Sample], world: World, *, capacity: int = 64) -> dict[str, float]:
    metrics = backward(state.model, samples, world, capacity=capacity, step=state.version)
    metrics |= update(state.model, state.optimizer, 1.0)
    state.version += 1
    return metrics


def train_until(state: TrainerState, world: World, *, until: int) -> TrainerState:
    while state.version < until:
        train_step(state, random_samples([30, 20, 12], seed=state.version), world)
    return state


def train(
    config: RunConfig, state: TrainerState, world: World, *, until: int, lengths: list[int], capacity: int = 64
) -> list[dict[str, float]]:
    """Take the trainer's own steps on a random batch of its own each, up to a version; return their metrics."""
    stepper, metrics = Stepper(config, state, world), []
    while state.version < until:
        samples = random_samples(lengths, seed=state.version)
        metrics.append(stepper.step(batch_reply(samples, world, capacity=capacity, step=state.version)))
    return metrics


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def content_of(state: TrainerState) -> dict[str, torch.Tensor]:
    """All that a checkpoint must bring back. A collective."""
    return weights_of(state.model) | {
        f"{key} of {name}": whole(tensor)
        for name, parameter in state.model.named_parameters()
        for key, tensor in state.optimizer.state[parameter].items()
    }


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def open_store(
    folder: Path,
    world: World,
    config: Checkpoints | None = None,
    *,
    exporter: Exporter | None = None,
    waits: Waits | None = None,
) -> CheckpointStore:
    waits = waits or Waits("trainer")
    return CheckpointStore(folder, config or Checkpoints(), world, waits=waits, disk_timeout_s=60, exporter=exporter)


def open_exporter(
    folder: Path, tokenizer: Path, model: PreTrainedModel, world: World, dtype: torch.dtype = torch.float32
) -> Exporter | None:
    return Exporter(folder, model, open_tokenizer(str(tokenizer), False), dtype) if world.is_main else None


def save(folder: Path, state: TrainerState, world: World, config: Checkpoints | None = None) -> None:
    """Returns when the checkpoint is whole."""
    store = open_store(folder, world, config)
    store.save(state)
    store.wait()


def save_run(folder: Path, state: TrainerState, model: Path, world: World) -> None:
    """Save a checkpoint and its export, as in the folder of a run."""
    exporter = open_exporter(folder / "weights", model, state.model, world)
    store = open_store(folder / "checkpoints", world, exporter=exporter)
    store.save(state)
    store.wait()


def take_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Over all tensors, relative to the largest value of each."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=1e-12)) for name in one)


def logprobs_of(
    model: Path,
    tensors: dict[str, np.ndarray],
    ids: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    attn: str | None = None,
) -> np.ndarray:
    """[T - 1] of each token after those before it, by transformers, of the model with these tensors."""
    with TemporaryDirectory() as folder:
        shutil.copy(model / "config.json", folder)
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn)
    with torch.no_grad():
        found = loaded(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return found.gather(-1, torch.tensor(ids)[1:, None])[:, 0].numpy()
