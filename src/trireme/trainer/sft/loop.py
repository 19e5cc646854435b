"""Supervised fine-tuning: the trainer's step with the cross-entropy loss, on conversations from disk."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack

import torch

from trireme.algo.columns import Totals
from trireme.algo.loss.loss import cross_entropy
from trireme.algo.packing import Sample, micro_batches_of_rank, num_learned
from trireme.base.log import get_logger
from trireme.base.timing import age_s
from trireme.base.waiting import Waits
from trireme.config.sft import SftConfig
from trireme.journal.origin import read_origin
from trireme.journal.rank_shares import cost_of_model
from trireme.journal.settings import Settings
from trireme.messages import MicroBatch
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.spans import TRAINER, open_spans
from trireme.monitor.wandb_mirror import open_wandb_mirror
from trireme.trainer.checkpoint.checkpoint import CheckpointStore
from trireme.trainer.checkpoint.export import Exporter
from trireme.trainer.checkpoint.state import TrainerState
from trireme.trainer.model.forward import compute_columns
from trireme.trainer.model.model import load_model
from trireme.trainer.model.vision import give_pictures
from trireme.trainer.optim.optimizer import build_optimizer, set_lr
from trireme.trainer.parallel.mesh import keep_alive, open_world
from trireme.trainer.perf import flops_per_token, peak_memory, throughput
from trireme.trainer.profiler import open_profiler
from trireme.trainer.sft.dataset import SampleFiles
from trireme.trainer.sft.prepare_data import open_tokenizer_of, picture_files, prepare_data, steps_of
from trireme.trainer.step import forward_backward, optimizer_step

log = get_logger("sft")

TIMEOUT_S = 3600.0  # timeout of one collective, in seconds; rank 0 restarts it while it reads the data
MOST_NATS = 700.0  # the largest loss whose perplexity is finite


def train_sft(config: SftConfig) -> None:
    """Train to the last step; write checkpoints and weights in Hugging Face format."""
    with ExitStack() as stack:
        sft = Sft(config, stack)
        sft.measure_base()
        while sft.state.version < sft.last_step:
            metrics = sft.step()
            sft.validate_if_due(metrics)
            sft.record(metrics)
            sft.save_if_due()


class Sft:
    """One rank of supervised fine-tuning, with all its resources open."""

    def __init__(self, config: SftConfig, stack: ExitStack) -> None:
        """Load data, model and checkpoint. The stack closes everything.

        Raises:
            ConfigError: the data, the tokenizer or the model cannot be loaded.
        """
        # Random weights, adapters and their dropout follow from the seed.
        torch.manual_seed(config.seed)
        self.config = config
        world = self.world = stack.enter_context(
            open_world(config.device, config.model, threads=config.threads, timeout_s=TIMEOUT_S)
        )

        self._waits = waits = Waits("sft" if world.is_main else f"sft.{world.rank}", config.paths.logs)
        spans = stack.enter_context(open_spans(config.paths.spans if world.is_main else None))
        self.lane = spans.lane(TRAINER, what="start", ago_s=age_s())

        # Data come first, so that a mistake in them shows before a large model is loaded.
        self.train, self.held_out = prepare_data(config, world, waits, keep_alive(world, timeout_s=TIMEOUT_S))
        assert config.model.name is not None, "`resolve_sft` fills it in"
        model = load_model(config.model, config.model.name, world)
        self.state = TrainerState(model=model, optimizer=build_optimizer(model, config.optim))

        # Only rank 0 exports.
        exporter = None
        if world.is_main:
            dtype = torch.float32 if config.device == "cpu" else torch.bfloat16
            exporter = Exporter(config.paths.weights, model, open_tokenizer_of(config), dtype)
        self.checkpoints = CheckpointStore(
            config.paths.checkpoints,
            config.ckpt,
            world,
            waits=waits,
            disk_timeout_s=config.disk_timeout_s,
            exporter=exporter,
        )
        stack.callback(self.checkpoints.close)
        self.checkpoints.resume(self.state, resume=config.resume)

        if world.is_main:
            stack.enter_context(open_wandb_mirror(config))
        self.metrics = MetricsFile(config.paths.metrics, process="sft")
        stack.callback(self.metrics.close)

        # each of the settings that followed one another, with its first step and the length of the run by it
        origin = read_origin(config.paths.root)
        self._first, self._schedule_shift = (origin.begins_at, origin.schedule_shift) if origin else (0, 0)
        eras = Settings(config).eras()
        self._eras = [(begin, each, steps_of(each, self.train, max(begin, self._first))) for begin, each in eras]
        self.last_step = self._eras[-1][2]

        self._base: dict[str, float] = {}  # measured before the first step and recorded with it
        self._pictures = picture_files(config)
        self._cost = cost_of_model(config.model.name, attention=config.model.attn, cp=config.model.cp)

        epochs = self.train.passed(self.last_step)
        log.info("%d steps of %d samples, %.2f epochs", self.last_step, config.batch_size, epochs)

        # A resumed run may have no step left to take.
        if (version := self.state.version) >= self.last_step:
            done = self.train.passed(version)
            log.info("all %d steps are trained (%.2f epochs): nothing is left to do", version, done)
        self.profiler = stack.enter_context(open_profiler(config, world))
        self.lane.enter(None)

    def _pack(self, samples: list[Sample], config: SftConfig) -> list[MicroBatch]:
        """Return this rank's rows, or those of its team, and give the model their pictures."""
        capacity = config.micro_batch_tokens or config.seq_len
        rows = micro_batches_of_rank(
            samples, capacity=capacity, rank=self.world.dp_rank, world=self.world.dp_size, cost=self._cost
        )
        digests = {picture.digest for row in rows for picture in row.tokens.pictures}
        give_pictures(self.state.model, {digest: self._pictures.read(digest) for digest in digests})
        return rows

    def step(self) -> dict[str, float]:
        """Take one optimizer step on the next batch."""
        began = time.perf_counter()
        with self.lane.doing("wait", step=self.state.version, why="data from disk"):
            samples = self.train.batch(self.state.version)
        with self.lane.doing("train", step=self.state.version):
            state, loss_tokens = self.state, sum(num_learned(samples))
            # A step is taken by the settings that held at it, also when it is repeated after a resume.
            _, config, last = next(era for era in reversed(self._eras) if era[0] <= state.version)
            rows = self._pack(samples, config)
            place, length = state.version + self._schedule_shift, last + self._schedule_shift
            lr = set_lr(state.optimizer, config.optim, config.scheduler, step=place, max_steps=length)
            metrics = forward_backward(
                state.model,
                rows,
                loss_tokens=loss_tokens,
                step=state.version,
                loss_function=cross_entropy,
                world=self.world,
            )

            metrics |= optimizer_step(state, config.optim) | {"lr": lr, "loss_tokens": loss_tokens}
            state.version += 1

        # Figures of the step, whose time includes reading the data.
        metrics |= {"epoch": self.train.passed(self.state.version), "perplexity": _perplexity(metrics["loss"])}
        tokens = sum(sample.tokens.length for sample in samples)
        flops = flops_per_token(self.state.model, tokens / len(samples))
        seconds = time.perf_counter() - began
        metrics |= throughput(tokens=tokens, seconds=seconds, flops=flops, world_size=self.world.size)
        return metrics | peak_memory(self.world.device)

    def measure_base(self) -> None:
        """Measure the validation loss of the model that training starts from. A collective."""
        if self.held_out and self.state.version == self._first:
            with self.lane.doing("evaluate"):
                loss = self._validation_loss(self.held_out)
            self._base = {"validation/base_loss": loss}
            log.info("before the first step: validation loss %.4f", loss)

    def validate_if_due(self, metrics: dict[str, float]) -> None:
        """Add `validation/…` to the metrics at the interval and after the last step. A collective."""
        interval, version = self.config.validation_interval, self.state.version
        is_due = version == self.last_step or (interval is not None and version % interval == 0)
        if self.held_out and is_due:
            with self.lane.doing("evaluate", step=version):
                loss = self._validation_loss(self.held_out)
            metrics |= {"validation/loss": loss, "validation/perplexity": _perplexity(loss)}

    @torch.no_grad()
    def _validation_loss(self, held_out: SampleFiles) -> float:
        """Return the mean loss over all learned tokens, a batch at a time."""
        # Sums, not means of means: batches have different numbers of learned tokens.
        sums = {"loss": 0.0, "tokens": 0.0}
        size = self.config.batch_size
        for first in range(0, len(held_out), size):
            samples = [held_out[index] for index in range(first, min(first + size, len(held_out)))]
            for row in self._pack(samples, self.config):
                columns = compute_columns(self.state.model, row, self.world.device)
                sums["loss"] += float(cross_entropy(columns, Totals(tokens=1, samples=1)).value)
                sums["tokens"] += float(columns.mask.sum())
        sums = self.world.sum(sums)  # the first rank of a team counts its rows
        return sums["loss"] / sums["tokens"]

    def save_if_due(self) -> None:
        """Save a checkpoint if due, in the background; after the last step, wait until it is written."""
        version, last = self.state.version, self.last_step

        is_due = self.checkpoints.is_due(version, last=last)
        if is_due or self.config.evaluated_at(version, last=last):
            with self.lane.doing("save", step=version):
                # Metrics first: a run that resumes from the checkpoint does not compute them again.
                self.metrics.flush_all(self._waits, self.config.disk_timeout_s)
                self.checkpoints.save(self.state)
                if version == last:
                    self.checkpoints.wait()

    def record(self, metrics: dict[str, float]) -> None:
        self.profiler.step_done(self.state.version)
        if not self.world.is_main:
            return
        self.metrics.append(self.state.version - 1, metrics | self._base)
        self._base = {}
        validation = f"  validation {metrics['validation/loss']:.4f}" if "validation/loss" in metrics else ""
        log.info(
            "step %d/%d  epoch %.2f  loss %.4f  grad %.3f  lr %.2e  %.0f tok/s%s",
            self.state.version,
            self.last_step,
            metrics["epoch"],
            metrics["loss"],
            metrics["grad_norm"],
            metrics["lr"],
            metrics["perf/tokens_per_s"],
            validation,
        )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, MOST_NATS))
