"""The trainer: asks for a batch, takes a step, publishes the new policy. The loop is at the top; what it uses below."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from trireme.base.log import get_logger
from trireme.base.paths import step_folder
from trireme.base.timing import Timer
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.messages import BatchReply, Done, GetBatch
from trireme.monitor.metrics import MetricsFile
from trireme.trainer.checkpoint import CheckpointStore, TrainerState
from trireme.trainer.export import save_pretrained
from trireme.trainer.heartbeat import Activity, heartbeat
from trireme.trainer.mesh import World, open_world
from trireme.trainer.model import load_model, num_parameters
from trireme.trainer.optim import build_optimizer, set_lr
from trireme.trainer.perf import flops_per_token, throughput
from trireme.trainer.publish import Publisher, served_dtype
from trireme.trainer.step import forward_backward, policy_gradient, update
from trireme.transport.control import ControlClient

log = get_logger("trainer")


def train(config: RunConfig) -> None:
    """Runs until version `max_steps` is trained, confirmed by the engines, and saved."""
    with open_trainer(config) as trainer:
        trainer.publish()
        while trainer.state.version < config.max_steps:
            batch = trainer.receive_batch()
            metrics = trainer.step(batch)
            trainer.publish()
            trainer.save_if_due()
            trainer.record(metrics)
        trainer.say_done()


@contextmanager
def open_trainer(config: RunConfig) -> Iterator[Trainer]:
    """Joins the mesh, loads the model and, when resuming, the checkpoint; closes everything on any way out."""
    trainer = config.trainer
    torch.manual_seed(config.seed)
    with ExitStack() as stack:
        world = stack.enter_context(
            open_world(config.device, threads=trainer.threads, timeout_s=trainer.batch_timeout_s)
        )
        waits = Waits("trainer" if world.is_main else f"trainer.{world.rank}", config.paths.logs)
        address = f"tcp://{config.ports.host}:{config.ports.batches}"
        control = ControlClient(address, waits)
        stack.callback(control.close)
        activity = Activity()
        if world.is_main:
            stack.enter_context(heartbeat(address, config.run_id, waits, activity))
        model = load_model(trainer.model, trainer.model.name or config.model.name, world)
        state = TrainerState(model=model, optimizer=build_optimizer(model, trainer.optim))
        checkpoints = CheckpointStore(config.paths.checkpoints, trainer.ckpt, world)
        checkpoints.resume(state, resume=config.resume)
        publisher = Publisher(config, model, world, control if world.is_main else None)
        stack.callback(publisher.close)
        activity.state = "running"
        yield Trainer(config, world, state, checkpoints, publisher, control, activity)


@dataclass
class Trainer:
    """One rank, with everything open."""

    config: RunConfig
    world: World
    state: TrainerState
    checkpoints: CheckpointStore
    publisher: Publisher
    control: ControlClient
    activity: Activity

    def __post_init__(self) -> None:
        self._timer = Timer()
        self._metrics = MetricsFile(self.config.paths.metrics, process="trainer")
        self._step_began = time.perf_counter()
        self._loss = policy_gradient(self.config.trainer.loss)
        self._num_parameters = num_parameters(self.state.model)

    def receive_batch(self) -> BatchReply:
        """This rank's share of batch n = version, whenever the orchestrator has it."""
        request = GetBatch(
            run_id=self.config.run_id, step=self.state.version, rank=self.world.rank, world=self.world.size
        )
        with self._timer.span("wait_for_batch"):
            reply = self.control.ask(
                request, what=f"batch {request.step}", deadline_s=self.config.trainer.batch_timeout_s
            )
        assert isinstance(reply, BatchReply), reply
        assert reply.step == request.step, f"asked for batch {request.step}, got {reply.step}"
        return reply

    def step(self, batch: BatchReply) -> dict[str, float]:
        """One optimizer step: version n becomes n + 1."""
        trainer, state = self.config.trainer, self.state
        lr = set_lr(
            state.optimizer, trainer.optim, trainer.scheduler, step=state.version, max_steps=self.config.max_steps
        )
        began = time.perf_counter()
        with self._timer.span("forward_backward"):
            metrics = forward_backward(
                state.model,
                batch.micro_batches,
                loss_tokens=batch.loss_tokens,
                step=state.version,
                loss_function=self._loss,
                world=self.world,
            )
        with self._timer.span("optimizer"):
            metrics |= update(state.model, state.optimizer, trainer.optim.max_norm)
        state.version += 1
        self.activity.version = state.version
        return metrics | {"lr": lr} | self._throughput(batch, time.perf_counter() - began)

    def _throughput(self, batch: BatchReply, seconds: float) -> dict[str, float]:
        tokens = sum(micro_batch.tokens.length for micro_batch in batch.micro_batches) * self.world.size
        samples = sum(len(micro_batch.lengths) for micro_batch in batch.micro_batches) * self.world.size
        flops = flops_per_token(self.state.model, self._num_parameters, tokens / max(1, samples))
        return throughput(tokens=tokens, seconds=seconds, flops=flops, world_size=self.world.size)

    def publish(self) -> None:
        """Makes the new policy live in all engines."""
        with self._timer.span("publish"):
            self.publisher.publish(self.state.version)

    def save_if_due(self) -> None:
        """A checkpoint, and the weights in Hugging Face format, at the interval and after the last step."""
        if not self.checkpoints.is_due(self.state.version, last=self.config.max_steps):
            return
        with self._timer.span("checkpoint"):
            self.checkpoints.save(self.state)
            save_pretrained(
                self.state.model,
                step_folder(self.config.paths.weights, self.state.version),
                tokenizer=self.config.trainer.tokenizer.name or self.config.model.name,
                dtype=getattr(torch, served_dtype(self.config)),
                world=self.world,
                trust_remote_code=self.config.trainer.model.trust_remote_code,
            )

    def record(self, metrics: dict[str, float]) -> None:
        """One line per step, of rank 0."""
        now = time.perf_counter()
        metrics |= self._timer.take() | {"time/step": now - self._step_began}
        self._step_began = now
        if self.world.is_main:
            step = self.state.version - 1
            self._metrics.append(step, metrics)
            log.info(
                "step %d/%d  loss %.4f  grad %.3f  %.0f tok/s",
                self.state.version,
                self.config.max_steps,
                metrics["loss"],
                metrics["grad_norm"],
                metrics["perf/tokens_per_s"],
            )

    def say_done(self) -> None:
        """The orchestrator may finish; nothing more will be asked."""
        self.activity.state = "done"
        if self.world.is_main:
            self.control.ask(
                Done(run_id=self.config.run_id, version=self.state.version),
                what="its good-bye",
                deadline_s=self.config.weight_broadcast.timeout_s,
            )
