"""The orchestrator: fills a batch, commits it to the journal, hands it out. The loop is at the top.

Three tasks run beside the loop: the scheduler issues rollouts, the evaluator evaluates versions, the control server
answers the trainer. A crash of any of them ends them all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from trireme.base.errors import ConfigError, TriremeError
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.run import RunConfig
from trireme.ledger.journal import Journal
from trireme.ledger.records import BatchRecord, State
from trireme.monitor.metrics import MetricsFile
from trireme.orchestrator.answers import Answers, Peers
from trireme.orchestrator.batcher import Batcher, batch_metrics
from trireme.orchestrator.buffer import Buffer
from trireme.orchestrator.chat import open_chat_tokenizer
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.evaluator import Evaluator
from trireme.orchestrator.inference_pool import InferencePool, open_inference_pool
from trireme.orchestrator.policy import Policy
from trireme.orchestrator.rollouts import RolloutRunner
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.status import Status, serve_status
from trireme.transport.control import ControlServer

log = get_logger("orchestrator")


def orchestrate(config: RunConfig) -> None:
    """Runs until the last version is live and evaluated, and the trainer has said good-bye."""
    try:
        asyncio.run(_orchestrate(config))
    except* TriremeError as group:
        raise _first(group) from None


async def _orchestrate(config: RunConfig) -> None:
    async with open_orchestrator(config) as orchestrator:
        await drive(orchestrator)


async def drive(o: Orchestrator) -> None:
    """From the next batch to the last one."""
    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(o.control.serve(o.answers)),
            tasks.create_task(o.start_engines_and_watch()),
            tasks.create_task(o.scheduler.run()),
            tasks.create_task(o.fail_with_policy()),
        ]
        evaluation = tasks.create_task(o.evaluator.run())
        while o.scheduler.next_batch < o.config.max_steps:
            await o.next_batch()
        await o.finish(evaluation)
        for task in background:
            task.cancel()


def _first(group: BaseExceptionGroup) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass
class Orchestrator:
    """Everything open."""

    config: RunConfig
    waits: Waits
    status: Status
    pool: InferencePool
    journal: Journal
    policy: Policy
    buffer: Buffer
    scheduler: Scheduler
    batcher: Batcher
    evaluator: Evaluator
    control: ControlServer
    answers: Answers
    peers: Peers
    metrics: MetricsFile
    counters: dict[str, int]

    async def next_batch(self) -> None:
        """One batch: filled, on disk, and only then to be had."""
        step = self.scheduler.next_batch
        began = time.perf_counter()
        rollouts, dropped = await self.batcher.fill(step)
        metrics = batch_metrics(step, rollouts, dropped)
        self.counters["trained"] = self.counters.get("trained", 0) + len(rollouts)
        self.counters["dropped"] = self.counters.get("dropped", 0) + len(dropped)
        filled = time.perf_counter()
        state = State(
            next_batch=step + 1,
            next_group=self.buffer.next_group,
            cursors=self.buffer.cursors(),
            open_groups=self.scheduler.open_groups(),
            counters=self.counters,
        )
        record = BatchRecord(step=step, rollouts=rollouts, dropped=dropped, state=state, metrics=metrics)
        await asyncio.to_thread(self.journal.append, record)
        self.scheduler.batch_closed()
        self.answers.batch_closed()
        metrics |= {"time/fill_batch": filled - began, "time/journal": time.perf_counter() - filled}
        metrics["time/update_weights"] = self.policy.update_seconds
        self.policy.update_seconds = 0.0
        self.metrics.append(step, metrics)
        log.info("batch %d  reward %.3f  lag %.2f", step, metrics["reward/mean"], metrics["lag/mean"])

    async def start_engines_and_watch(self) -> None:
        await self.pool.wait_until_up(self.config.inference.start_timeout_s)
        self.status.state = "running"
        await self.pool.watch()

    async def fail_with_policy(self) -> None:
        """Raises what makes the live weights untrustworthy."""
        await self.policy.failure

    async def finish(self, evaluation: asyncio.Task) -> None:
        """The last version live, evaluated, and the trainer gone."""
        self.status.state = "finishing"
        deadline_s = self.config.orchestrator.trainer_timeout_s
        with self.waits.waiting(f"version {self.config.max_steps}", peer="trainer", deadline_s=deadline_s) as wait:
            while not self.peers.trainer_done.is_set() or not evaluation.done():
                wait.what = "its good-bye" if evaluation.done() else f"version {self.config.max_steps}, to evaluate it"
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await self.peers.trainer_done.wait()
                await asyncio.wait([evaluation], timeout=0.2)
                wait.check()
        await asyncio.sleep(0.2)  # the answer to the good-bye is on its way
        self.status.state = "done"


@asynccontextmanager
async def open_orchestrator(config: RunConfig) -> AsyncIterator[Orchestrator]:
    """Opens everything, in the order in which it is needed; closes it in reverse, on any way out."""
    orchestrator = config.orchestrator
    waits = Waits("orchestrator", config.paths.logs)
    peers = Peers()
    status = Status(config, waits, peers)
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_status(status, orchestrator.server))
        control = ControlServer(config.ports.host, config.ports.batches or 0)
        stack.callback(control.close)
        journal, state = _open_journal(config)
        tokenizer = open_chat_tokenizer(config.trainer.tokenizer.name or config.model.name)
        pool = await stack.enter_async_context(
            open_inference_pool(
                [f"http://{config.inference.server.host}:{config.inference.server.port}"],
                waits=waits,
                max_model_len=config.inference.model.max_model_len or config.seq_len,
                timeout_s=orchestrator.engine_timeout_s,
                max_concurrent=orchestrator.max_concurrent,
            )
        )
        environments = await _open_environments(config, orchestrator.env, stack)
        evaluated = await _environments_to_evaluate(config, environments, stack)
        policy = Policy(pool, config.weight_broadcast, waits)
        buffer = Buffer(
            {name: environment.num_train for name, environment in environments.items()},
            {name: environment.config.weight for name, environment in environments.items()},
            seed=config.seed,
            shuffle=orchestrator.buffer.shuffle,
            state=state,
        )
        runner = RolloutRunner(config, pool, tokenizer)
        scheduler = Scheduler(config, environments, buffer, policy, runner, waits, next_batch=state.next_batch)
        metrics = MetricsFile(config.paths.metrics, process="orchestrator")
        status.pool, status.policy, status.scheduler = pool, policy, scheduler
        yield Orchestrator(
            config=config,
            waits=waits,
            status=status,
            pool=pool,
            journal=journal,
            policy=policy,
            buffer=buffer,
            scheduler=scheduler,
            batcher=Batcher(config, scheduler),
            evaluator=Evaluator(config, evaluated, policy, runner, metrics),
            control=control,
            answers=Answers(config, journal, policy, scheduler, peers),
            peers=peers,
            metrics=metrics,
            counters=dict(state.counters),
        )


def _open_journal(config: RunConfig) -> tuple[Journal, State]:
    """A journal that has entries is only continued when asked to."""
    journal = Journal(config.paths.journal)
    step = config.trainer.ckpt.resume_step
    if step is not None and step >= 0:
        journal.rewind(step)
    elif journal.steps() and not config.resume and step is None:
        raise ConfigError(
            f"{config.paths.journal} holds {len(journal.steps())} batches of an earlier run - an empty folder was "
            "expected. Add --resume to go on with that run, or set another `output_dir` or `name`."
        )
    return journal, journal.head_state()


async def _open_environments(
    config: RunConfig, entries: tuple[EnvironmentConfig, ...], stack: AsyncExitStack
) -> dict[str, Environment]:
    environments = [
        await stack.enter_async_context(open_environment(entry, logs=config.paths.logs, seed=config.seed))
        for entry in entries
    ]
    for environment in environments:
        log.info("%s: %d training examples, %d held out", environment.name, environment.num_train, environment.num_eval)
        if environment.num_train == 0:
            raise ConfigError(
                f"The environment {environment.name!r} has no training examples - at least one was expected. "
                "Check its `args`."
            )
    return {environment.name: environment for environment in environments}


async def _environments_to_evaluate(
    config: RunConfig, trained: dict[str, Environment], stack: AsyncExitStack
) -> dict[str, Environment]:
    """The configured ones, or the held-out part of those that are trained on."""
    evaluation = config.orchestrator.eval
    if evaluation is None:
        return {}
    return await _open_environments(config, evaluation.env, stack) if evaluation.env else trained
