"""Supervised fine-tuning: the trainer's step with another loss, on conversations from disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from trireme.algo.packing import Sample, micro_batches_of_rank
from trireme.base.errors import ConfigError
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.sft import SftConfig
from trireme.messages import MicroBatch
from trireme.monitor.metrics import MetricsFile
from trireme.trainer.checkpoint import CheckpointStore, TrainerState
from trireme.trainer.data import Epochs, open_tokenizer, read_conversations, to_sample
from trireme.trainer.export import Exporter
from trireme.trainer.mesh import World, open_world
from trireme.trainer.model import load_model
from trireme.trainer.optim import build_optimizer, set_lr
from trireme.trainer.step import compute_columns, cross_entropy, forward_backward, update

log = get_logger("sft")

TIMEOUT_S = 3600.0
DISK_TIMEOUT_S = 86400.0  # as `disk_timeout_s` of `rl`


def train_sft(config: SftConfig) -> None:
    """Runs to `max_steps`; leaves checkpoints, and weights in Hugging Face format."""
    with open_sft(config) as sft:
        while sft.state.version < config.max_steps:
            metrics = sft.step()
            sft.validate_if_due(metrics)
            sft.record(metrics)
            sft.save_if_due()


@contextmanager
def open_sft(config: SftConfig) -> Iterator[Sft]:
    name = config.model.name
    if name is None:
        raise ConfigError("`model.name` is not set - a folder or hub name of a model was expected. Set it.")
    if config.data is None:
        raise ConfigError("`data` is not set - a .jsonl file of conversations was expected. Set it.")
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        world = stack.enter_context(open_world(config.device, threads=config.threads, timeout_s=TIMEOUT_S))
        tokenizer = config.tokenizer.name or name
        train, held_out = _read_samples(config, tokenizer)
        model = load_model(config.model, name, world)
        state = TrainerState(model=model, optimizer=build_optimizer(model, config.optim))
        checkpoints = _open_checkpoints(config, world, tokenizer)
        stack.callback(checkpoints.close)
        checkpoints.resume(state, resume=config.resume)
        metrics = MetricsFile(config.paths.metrics, process="sft")
        stack.callback(metrics.close)
        log.info("%d conversations to train on, %d held out", len(train), len(held_out))
        epochs = Epochs(train, config.batch_size, config.seed)
        yield Sft(config, world, state, checkpoints, metrics, epochs, held_out)


def _open_checkpoints(config: SftConfig, world: World, tokenizer: str) -> CheckpointStore:
    exporter = Exporter(
        config.paths.weights,
        world,
        tokenizer=tokenizer,
        dtype=torch.float32 if config.device == "cpu" else torch.bfloat16,
        trust_remote_code=config.model.trust_remote_code,
    )
    return CheckpointStore(
        config.paths.checkpoints,
        config.ckpt,
        world,
        waits=Waits("sft" if world.is_main else f"sft.{world.rank}", config.paths.logs),
        disk_timeout_s=DISK_TIMEOUT_S,
        exporter=exporter,
    )


def _read_samples(config: SftConfig, tokenizer_name: str) -> tuple[list[Sample], list[Sample]]:
    tokenizer = open_tokenizer(tokenizer_name, config.model.trust_remote_code)
    assert config.data is not None
    samples = [to_sample(tokenizer, messages, config.seq_len) for messages in read_conversations(config.data)]
    if config.validation:
        held_out = [
            to_sample(tokenizer, messages, config.seq_len) for messages in read_conversations(config.validation)
        ]
        return samples, held_out
    count = int(len(samples) * config.validation_fraction)
    return samples[count:], samples[:count]


@dataclass
class Sft:
    """One rank, with everything open."""

    config: SftConfig
    world: World
    state: TrainerState
    checkpoints: CheckpointStore
    metrics: MetricsFile
    data: Epochs
    held_out: list[Sample]

    def _pack(self, samples: list[Sample]) -> tuple[list[MicroBatch], int]:
        micro_batches = micro_batches_of_rank(
            samples,
            capacity=self.config.micro_batch_tokens or self.config.seq_len,
            rank=self.world.rank,
            world=self.world.size,
        )
        return micro_batches, sum(int(sample.tokens.loss_mask.sum()) for sample in samples)

    def step(self) -> dict[str, float]:
        """One optimizer step on the next batch."""
        config, state = self.config, self.state
        began = time.perf_counter()
        samples = self.data.batch(state.version)
        lr = set_lr(state.optimizer, config.optim, config.scheduler, step=state.version, max_steps=config.max_steps)
        micro_batches, loss_tokens = self._pack(samples)
        metrics = forward_backward(
            state.model,
            micro_batches,
            loss_tokens=loss_tokens,
            step=state.version,
            loss_function=cross_entropy,
            world=self.world,
        )
        metrics |= update(state.model, state.optimizer, config.optim.max_norm)
        state.version += 1
        tokens = sum(sample.tokens.length for sample in samples)
        return metrics | {"lr": lr, "perf/tokens_per_s": tokens / (time.perf_counter() - began)}

    def validate_if_due(self, metrics: dict[str, float]) -> None:
        """Adds `validation/loss` at the interval and after the last step. A collective."""
        interval, version = self.config.validation_interval, self.state.version
        if not self.held_out or not (version == self.config.max_steps or (interval and version % interval == 0)):
            return
        micro_batches, loss_tokens = self._pack(self.held_out)
        with torch.no_grad():
            metrics["validation/loss"] = self._evaluate(micro_batches, loss_tokens)

    def _evaluate(self, micro_batches: list[MicroBatch], loss_tokens: int) -> float:
        total = 0.0
        for micro_batch in micro_batches:
            columns = compute_columns(self.state.model, micro_batch, self.world.device)
            total += float(cross_entropy(columns, loss_tokens).sums["loss"])
        return self.world.sum({"loss": total})["loss"] / max(1, loss_tokens)

    def save_if_due(self) -> None:
        """Written while training goes on; after the last step, when this returns."""
        version, last = self.state.version, self.config.max_steps
        if self.checkpoints.is_due(version, last=last):
            self.checkpoints.save(self.state)
            if version == last:
                self.checkpoints.wait()

    def record(self, metrics: dict[str, float]) -> None:
        if not self.world.is_main:
            return
        self.metrics.append(self.state.version - 1, metrics)
        validation = f"  validation {metrics['validation/loss']:.4f}" if "validation/loss" in metrics else ""
        log.info(
            "step %d/%d  loss %.4f  grad %.3f  lr %.2e  %.0f tok/s%s",
            self.state.version,
            self.config.max_steps,
            metrics["loss"],
            metrics["grad_norm"],
            metrics["lr"],
            metrics["perf/tokens_per_s"],
            validation,
        )
