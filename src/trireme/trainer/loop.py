"""The trainer: receive a batch, take a step, publish the new policy. The loop comes first, then what it uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch
import torch.distributed as dist

from trireme.base.errors import DeadlineExceeded
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.timing import Timer, age_s
from trireme.base.waiting import Waits
from trireme.config.run import RunConfig
from trireme.messages import BatchReply, Done, GetBatch, Ok, Publish, Reply, decode_reply, encode
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.spans import TRAINER, What, open_spans
from trireme.monitor.timeline import idle
from trireme.trainer.checkpoint.checkpoint import CheckpointStore
from trireme.trainer.checkpoint.export import Exporter
from trireme.trainer.checkpoint.resume import check_shared
from trireme.trainer.heartbeat import Activity, heartbeat
from trireme.trainer.logprob_log import LogprobLog
from trireme.trainer.model.forward import computed_fracs
from trireme.trainer.out_of_memory import leave_to_engine
from trireme.trainer.parallel.mesh import CONTEXT, World, keep_alive, open_world
from trireme.trainer.perf import flops_per_token, peak_memory, throughput
from trireme.trainer.profiler import open_profiler
from trireme.trainer.publish.publisher import Publisher
from trireme.trainer.step import Stepper, base_state
from trireme.trainer.tokenizer import open_tokenizer
from trireme.trainer.try_step import try_step
from trireme.transport.control import ControlClient

log = get_logger("trainer")

ACTIVITIES: dict[str, What] = {
    "wait_for_batch": "wait",
    "publish": "transfer",
    "confirm": "transfer",
    "checkpoint": "save",
    "forward_backward": "train",
    "optimizer": "train",
}
"""The activity that each span of the timer is shown as in the trainer's timeline."""

NO_BATCH = "no batch yet"


def train(config: RunConfig) -> None:
    """Train until version `max_steps` is confirmed by the engines and saved."""
    with ExitStack() as stack:
        trainer = Trainer(config, stack)
        trainer.try_step()
        trainer.find_progress()
        trainer.publish()
        while trainer.state.version < config.max_steps:
            batch = trainer.receive_batch()
            metrics = trainer.step(batch)
            trainer.publish()
            trainer.record(metrics)
        trainer.settle()
        trainer.finish()


class Trainer:
    """One rank of the trainer, with all its resources open."""

    def __init__(self, config: RunConfig, stack: ExitStack) -> None:
        """Join the mesh, load the model and, on resume, the checkpoint. The stack closes everything."""
        # Resources are opened in this order because each needs those before it; the stack closes them in reverse.
        self.config = config
        trainer = config.trainer
        world = self.world = stack.enter_context(
            open_world(config.device, trainer.model, threads=trainer.threads, timeout_s=trainer.batch_timeout_s)
        )
        if config.shares_gpus:
            leave_to_engine(config.inference.gpu_share, world.device)

        # Each rank has a lane and waits of its own; the timeline shows those of rank 0.
        self.waits = Waits("trainer" if world.is_main else f"trainer.{world.rank}", config.paths.logs)
        spans = stack.enter_context(open_spans(config.paths.spans if world.is_main else None))
        self.lane = spans.lane(TRAINER, what="start", ago_s=age_s(), words=lambda: _missing(self.waits))

        # While rank 0 waits for the orchestrator, the other ranks wait in a collective, whose timeout it restarts.
        address = f"tcp://{config.hosts.orchestrator}:{config.ports.batches}"
        self.control = ControlClient(
            address, self.waits, meanwhile=keep_alive(world, timeout_s=trainer.batch_timeout_s)
        )
        stack.callback(self.control.close)

        # The orchestrator must know that the trainer is alive while a large model loads.
        self.activity = Activity()
        if world.is_main:
            stack.enter_context(heartbeat(address, config.run_id, self.waits, self.activity))
        reach("trainer.starting", rank=world.rank)

        # Ranks on several machines write one checkpoint together, so they must see one folder.
        if len(config.hosts.trainer) > 1:
            check_shared(config.paths.root, world)

        self.state = base_state(config, world)

        # Only rank 0 exports: it writes the weights of all ranks from the files of the checkpoint.
        exporter = None
        if world.is_main:
            tokenizer = open_tokenizer(trainer.tokenizer.name or config.model.name, trainer.model.trust_remote_code)
            exporter = Exporter(config.paths.weights, self.state.model, tokenizer, getattr(torch, config.served_dtype))
        self.checkpoints = CheckpointStore(
            config.paths.checkpoints,
            trainer.ckpt,
            world,
            waits=self.waits,
            disk_timeout_s=config.disk_timeout_s,
            exporter=exporter,
        )
        stack.callback(self.checkpoints.close)
        self.checkpoints.resume(self.state, resume=config.resume)
        reach("trainer.resumed", rank=world.rank)

        # Only rank 0 talks to the orchestrator; the other ranks take part in gathering weights.
        control = self.control if world.is_main else None
        self.publisher = Publisher(config, self.state.model, world, control, self.waits, self.lane)
        stack.callback(self.publisher.close)
        self.metrics = MetricsFile(config.paths.metrics, process="trainer")
        stack.callback(self.metrics.close)

        # The stepper calls `settle` before it changes weights that engines may still have to be sent.
        self._timer = Timer(also=self._show_activity)
        self._logprob_log = LogprobLog(config.paths, world) if trainer.save_logprobs else None
        self._stepper = Stepper(
            config, self.state, world, self._timer, self._logprob_log, before_weights_change=self.settle
        )

        self._profiler = stack.enter_context(open_profiler(trainer, world))
        self._settled = self.state.version  # the newest version that was confirmed and, if due, saved
        self._settling_s = 0.0
        self.activity.state = "running"
        self.lane.enter(None)
        self._step_began = time.perf_counter()

    def _show_activity(self, name: str) -> AbstractContextManager[None]:
        what = ACTIVITIES[name]
        return self.lane.doing(what, step=self.state.version, why=NO_BATCH if what == "wait" else "")

    def try_step(self) -> None:
        """Try a step before the first one, if configured, so that too little memory shows at once."""
        if self.config.trainer.try_step and self.state.version < self.config.max_steps:
            with self.lane.doing("start", why="a step is tried"):
                began = time.perf_counter()
                try_step(self._stepper)
                peak_memory(self.world.device)  # resets the peak: that of the first step is its own
                log.info("a step on a row of full length was tried: %.1f s", time.perf_counter() - began)

    def find_progress(self) -> None:
        """Ask which version the engines confirmed last. A restarted trainer repeats the journal up to there."""
        with self.lane.doing("wait", why="the orchestrator"):
            newest = self.publisher.find_newest()
        if newest > self.state.version:
            self.activity.state = f"repeating steps up to version {newest}"
            log.info("the run had reached version %d; repeating it from version %d", newest, self.state.version)

    def receive_batch(self) -> BatchReply:
        """Return this rank's share of batch n = version, once the orchestrator has it.

        The orchestrator may answer rank 0 that an engine needs weights first: all ranks then publish them together.
        """
        with self._timer.span("wait_for_batch"):
            # Rank 0 asks first. Once it has its share, no engine needs weights, and the batch exists for others too.
            reply = self._ask_until_served(self._ask_for_batch)
            if not self.world.is_main and self.world.cp_rank == 0:
                reply = self._ask_for_batch()
            batch = share_with_team(reply, self.world)
        assert batch.step == self.state.version, f"asked for batch {self.state.version}, got {batch.step}"
        reach("trainer.batch_received", rank=self.world.rank)
        return batch

    def _ask_for_batch(self) -> Reply:
        step, world = self.state.version, self.world  # ranks that share their rows ask as one
        request = GetBatch(run_id=self.config.run_id, step=step, rank=world.dp_rank, world=world.dp_size)
        return self.control.ask(request, what=f"batch {step}", deadline_s=self.config.trainer.batch_timeout_s)

    def step(self, batch: BatchReply) -> dict[str, float]:
        """Make version n + 1 of version n. Gradients may be computed while engines still confirm version n."""
        began, settling_s = time.perf_counter(), self._settling_s
        with self.lane.doing("train", step=self.state.version):
            metrics = self._stepper.step(batch)
            reach("trainer.stepped", rank=self.world.rank)
            self.activity.version = self.state.version

            # The wait for engines is not work of this step, so it does not count as training time.
            seconds = time.perf_counter() - began - (self._settling_s - settling_s)
            rows = batch.micro_batches
            tokens = sum(row.tokens.length for row in rows) * self.world.dp_size
            samples = sum(len(row.lengths) for row in rows) * self.world.dp_size
            computed, of_existing = computed_fracs(self.state.model, rows)
            flops = flops_per_token(self.state.model, tokens / max(1, samples))

            # Tokens of shared prefixes are computed once, and each iteration computes all others again.
            flops *= self.config.trainer.num_iterations * computed
            metrics |= throughput(tokens=tokens, seconds=seconds, flops=flops, world_size=self.world.size)
            metrics |= {"perf/shared_frac": 1 - computed, "perf/tokens_computed_frac/trainer": of_existing}
            return metrics | peak_memory(self.world.device)

    def publish(self) -> None:
        """Send the policy to all engines if it is new. `settle` waits until they serve it."""
        with self._timer.span("publish"):
            self.publisher.send_if_new(self.state.version)
        reach("trainer.published", rank=self.world.rank)

    def _ask_until_served(self, ask: Callable[[], Reply]) -> Reply | None:
        """Ask on rank 0 until no engine needs weights first; return its reply, and None on other ranks. A collective.

        All ranks together send the weights to engines that have none, or to all if their last transfer was lost.
        """
        while True:
            # All ranks must agree on publishing, as gathering the weights is a collective.
            reply = ask() if self.world.is_main else None
            if isinstance(reply, Publish):
                log.info("%s: sending it version %d", reply.reason, self.state.version)
            if not self.world.agree(isinstance(reply, Publish)):
                return reply
            with self.lane.doing("transfer", step=self.state.version):
                if self.publisher.is_confirming:
                    self.publisher.confirm()
                else:
                    self.publisher.publish(self.state.version, everywhere=False)

    def settle(self) -> None:
        """Wait until engines have confirmed the weights, and save them if due. Called before the weights change."""
        began = time.perf_counter()
        if self.publisher.is_confirming:
            with self._timer.span("confirm"):
                self.publisher.confirm()

        # A version is saved only once engines confirmed it, so no checkpoint is ahead of what they serve.
        if self._settled < self.state.version:
            self._settled = self.state.version
            reach("trainer.confirmed", rank=self.world.rank)
            self._save_if_due()
        self._settling_s += time.perf_counter() - began

    def _save_if_due(self) -> None:
        """Save a checkpoint and an export at the interval and after the last step.

        Both are written in the background; after the last step this waits until they are on disk.
        """
        version, last = self.state.version, self.config.max_steps
        if self.checkpoints.is_due(version, last=last):
            with self._timer.span("checkpoint"):
                self.metrics.flush_all(self.waits, self.config.disk_timeout_s)
                self.checkpoints.save(self.state)
                if version == last:
                    self.checkpoints.wait()

    def record(self, metrics: dict[str, float]) -> None:
        """Write the step's metrics on rank 0, and on every rank the logprobs of the weights before the step."""
        self._profiler.step_done(self.state.version)
        # The step is over, so the copies of logprobs to the CPU hold nothing up.
        if self._logprob_log:
            self._logprob_log.write()

        now = time.perf_counter()
        metrics |= self._timer.take() | self.publisher.take_metrics()
        metrics |= {"time/step": now - self._step_began, "time/idle": idle(self.lane.take())}
        self._step_began = now

        if self.world.is_main:
            self.metrics.append(self.state.version - 1, metrics)
            reach("trainer.recorded")
            log.info(
                "step %d/%d  loss %.4f  grad %.3f  %.0f tok/s",
                self.state.version,
                self.config.max_steps,
                metrics["loss"],
                metrics["grad_norm"],
                metrics["perf/tokens_per_s"],
            )

    def finish(self) -> None:
        """Stay until the orchestrator needs no more weights: an engine may still start without any."""
        with self.lane.doing("save", step=self.state.version):
            self.checkpoints.wait()
        self.lane.enter("idle", step=self.state.version, why="every step is done")
        self.activity.state = "done"
        reach("trainer.finishing", rank=self.world.rank)
        self._ask_until_served(self._ask_to_leave)

    def _ask_to_leave(self) -> Reply:
        done = Done(run_id=self.config.run_id, version=self.state.version)
        try:
            return self.control.ask(done, what="leave to go", deadline_s=self.config.orchestrator.trainer_timeout_s)
        except DeadlineExceeded as error:  # everything is saved, so nothing depends on the answer
            log.warning("%s", error)
            return Ok()


def _missing(waits: Waits) -> str:
    """Return what the orchestrator reports as missing, for the timeline."""
    noted = next((wait for wait in waits.now() if wait.note), None)
    if noted is None:
        return ""
    return f"{NO_BATCH}: {noted.note}" if noted.what.startswith("batch") else noted.note


def share_with_team(reply: Reply | None, world: World) -> BatchReply:
    """Broadcast the batch that only a team's first rank has to all ranks that share its rows. A collective of these."""
    assert reply is None or isinstance(reply, BatchReply), reply
    if world.cp_size > 1:
        group = world.data_mesh[CONTEXT].get_group()
        # The other ranks learn the size before they can allocate memory for the content.
        content = bytearray(encode(reply)) if reply is not None else bytearray()
        size = torch.tensor([len(content)])
        dist.broadcast(size, group=group, group_src=0)
        data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group=group, group_src=0)
        if reply is None:
            reply = decode_reply(data.numpy().tobytes())
    assert isinstance(reply, BatchReply), f"the first rank of a team has no batch: {reply}"
    return reply
