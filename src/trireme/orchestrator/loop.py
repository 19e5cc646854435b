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

from trireme.algo.rules import rules_of
from trireme.algo.weight_checks import POLICY
from trireme.base.disk import when_there_is_room
from trireme.base.errors import ConfigError, TriremeError
from trireme.base.faults import reach
from trireme.base.garbage import rare_garbage_collection
from trireme.base.log import get_logger
from trireme.base.paths import step_folder, step_of
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.manifest import is_complete
from trireme.journal.records import BatchRecord, State
from trireme.journal.versions import Versions
from trireme.monitor.metrics import MetricsFile, latest_by_step, read_metrics
from trireme.monitor.spans import open_spans
from trireme.orchestrator.batch_metrics import batch_metrics, state_metrics
from trireme.orchestrator.batcher import Batcher, Filled
from trireme.orchestrator.buffer import Buffer
from trireme.orchestrator.engines.expert_routes import experts_to_replay
from trireme.orchestrator.engines.health import keep_engines
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool
from trireme.orchestrator.environment_counts import EnvironmentCounts
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.evaluation.evaluator import Evaluator
from trireme.orchestrator.evaluation.results import is_runs_own, results_path
from trireme.orchestrator.lanes import Lanes
from trireme.orchestrator.rollout.chat import open_chat_tokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.status import Status, serve_status
from trireme.orchestrator.teacher import open_teacher
from trireme.orchestrator.trainer_requests import Peers, TrainerRequests
from trireme.orchestrator.watcher import Watcher
from trireme.orchestrator.weights.policy import Policy
from trireme.orchestrator.weights.update import WeightUpdates
from trireme.transport.control import ControlServer

log = get_logger("orchestrator")

FAREWELL_S = 30.0
"""A trainer that has saved everything and is not heard of for this long has left."""


def orchestrate(config: RunConfig) -> None:
    """Runs until the last version is live and evaluated, and the trainer has said good-bye."""
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_orchestrate(config))
    except* TriremeError as group:
        raise _first(group) from None


def new_event_loop() -> asyncio.AbstractEventLoop:
    """libuv's, in C: with Python's own a rollout costs more."""
    import uvloop

    return uvloop.new_event_loop()


async def _orchestrate(config: RunConfig) -> None:
    if is_over(config):
        log.info("all %d steps are trained, confirmed, evaluated and saved: nothing is left to do", config.max_steps)
        return
    async with open_orchestrator(config) as orchestrator:
        await drive(orchestrator)


async def drive(o: Orchestrator) -> None:
    """From the next batch to the last one."""
    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(o.control.serve(o.requests)),
            tasks.create_task(o.status.keep_beating()),
            tasks.create_task(o.keep_engines()),
            tasks.create_task(o.scheduler.run()),
            tasks.create_task(o.fail_with_policy()),
            tasks.create_task(o.watcher.run()),
            tasks.create_task(o.lanes.keep(o.policy, o.scheduler, o.evaluator)),
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
    updates: WeightUpdates
    buffer: Buffer
    scheduler: Scheduler
    batcher: Batcher
    evaluator: Evaluator
    control: ControlServer
    requests: TrainerRequests
    peers: Peers
    metrics: MetricsFile
    watcher: Watcher
    lanes: Lanes
    environment_counts: EnvironmentCounts
    counters: dict[str, int]

    async def next_batch(self) -> None:
        """One batch: filled, on disk, and only then to be had."""
        step = self.scheduler.next_batch
        began = time.perf_counter()
        batch = await self.batcher.fill(step)
        with self.lanes.closing(step):
            metrics = await self._closed(step, batch, began)
        self.metrics.append(step, metrics)
        log.info("batch %d  reward %.3f  lag %.2f", step, metrics["reward/mean"], metrics["lag/mean"])

    async def _closed(self, step: int, batch: Filled, began: float) -> dict[str, float]:
        """On disk, and to be had. Returns its metrics."""
        rollouts, dropped = batch.rollouts, batch.dropped
        metrics = batch_metrics(step, rollouts, dropped, config=self.config, outcomes=batch.outcomes)
        self.counters["trained"] = self.counters.get("trained", 0) + len(rollouts)
        self.counters["dropped"] = self.counters.get("dropped", 0) + len(dropped)
        filled = time.perf_counter()
        record = self._close(step, batch, metrics)
        await self._commit(record)
        self.scheduler.batch_closed()
        self.requests.batch_closed()
        metrics = record.metrics | self.environment_counts.take()
        metrics |= {"time/fill_batch": filled - began, "time/journal": time.perf_counter() - filled}
        return metrics | self.updates.take_seconds() | {"perf/engine_idle_frac": self.lanes.idle_frac()}

    def _close(self, step: int, batch: Filled, metrics: dict[str, float]) -> BatchRecord:
        """Nothing may come in between: groups that are taken from now on are taken after this batch was closed."""
        self.buffer.close_batch(batch.outcomes, next_step=step + 1)
        state = State(
            next_batch=step + 1,
            open_groups=self.scheduler.open_groups(),
            counters=self.counters,
            baselines=batch.baselines,
            **self.buffer.state(),
        )
        return BatchRecord(
            step=step,
            rollouts=batch.rollouts,
            dropped=batch.dropped,
            state=state,
            metrics=metrics | state_metrics(state, config=self.config),
            rules=rules_of(self.config),
            outcomes=batch.outcomes,
        )

    async def _commit(self, record: BatchRecord) -> None:
        """Waits for room where the disk is full: the batch is not lost, and nobody has seen it."""
        reach("journal.before_append")
        await asyncio.to_thread(
            when_there_is_room,
            lambda: self.journal.append(record),
            what=f"batch {record.step}",
            folder=self.config.paths.journal,
            waits=self.waits,
            deadline_s=self.config.disk_timeout_s,
        )
        reach("journal.appended")

    async def keep_engines(self) -> None:
        if self.status.state == "starting":  # a run that only lacks its end is "finishing" by now
            self.status.state = "running"
        await keep_engines(self.pool, self.policy.admit, start_timeout_s=self.config.inference.start_timeout_s)

    async def fail_with_policy(self) -> None:
        """Raises what makes the live weights untrustworthy."""
        await self.updates.failure

    async def finish(self, evaluation: asyncio.Task) -> None:
        """The last version live and evaluated; then the trainer, which might have been needed till then, may leave."""
        self.status.state = "finishing"
        deadline_s = self.config.orchestrator.trainer_timeout_s
        what = f"version {self.config.max_steps}"
        with self.waits.waiting(what, peer="trainer", deadline_s=deadline_s, patient=True) as wait:
            while not (evaluation.done() and self.policy.version >= self.config.max_steps):
                wait.note = "to evaluate it" if self.policy.version < self.config.max_steps else "it is being evaluated"
                await asyncio.wait([evaluation], timeout=0.2)
                await asyncio.sleep(0.05)
                wait.check()
        reach("orchestrator.finishing")
        self.peers.trainer_may_leave.set()
        await self._see_trainer_off()
        self.status.state = "done"

    async def _see_trainer_off(self) -> None:
        """It may have died, or left, after it saved everything: then nobody will say good-bye."""
        deadline_s = self.config.orchestrator.trainer_timeout_s
        with self.waits.waiting("its good-bye", peer="trainer", deadline_s=deadline_s, patient=True) as wait:
            while not self.peers.trainer_left.is_set() and not (wait.waited_s > FAREWELL_S and is_over(self.config)):
                wait.check()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await self.peers.trainer_left.wait()
        await asyncio.sleep(0.2)  # the answer to the good-bye is on its way


@asynccontextmanager
async def open_orchestrator(config: RunConfig) -> AsyncIterator[Orchestrator]:
    """Opens everything, in the order in which it is needed; closes it in reverse, on any way out."""
    orchestrator = config.orchestrator
    waits = Waits("orchestrator", config.paths.logs)
    peers = Peers()
    waits.is_peer_busy = peers.is_any_busy
    status = Status(config, waits, peers)
    async with AsyncExitStack() as stack:
        stack.enter_context(serve_status(status, orchestrator.server))
        control = ControlServer(config.hosts.orchestrator, config.ports.batches or 0)
        stack.callback(control.close)
        reach("orchestrator.starting")
        journal, state = _open_journal(config)
        tokenizer = open_chat_tokenizer(config.trainer.tokenizer.name or config.model.name)
        pool = await stack.enter_async_context(
            open_inference_pool(
                config.engine_urls,
                waits=waits,
                max_model_len=config.inference.model.max_model_len or config.seq_len,
                timeout_s=orchestrator.engine_timeout_s,
                request_timeout_s=orchestrator.request_timeout_s,
                max_concurrent=orchestrator.max_concurrent,
                vocab_size=tokenizer.vocab_size,
                adapter=POLICY if config.serves_adapters else None,
                experts=experts_to_replay(config, tokenizer.model_config),
                shares_prefixes=config.shares_prefixes,
            )
        )
        spans = stack.enter_context(open_spans(config.paths.spans))
        lanes = Lanes(config, spans, pool)
        teacher = await stack.enter_async_context(open_teacher(orchestrator.teacher, tokenizer, waits))
        environments = await _open_environments(config, orchestrator.env, stack, waits)
        evaluated = await _environments_to_evaluate(config, environments, stack, waits)
        versions = Versions(config.paths.journal)
        policy = Policy(pool, waits, versions, offers=not config.synchronous, disk_timeout_s=config.disk_timeout_s)
        updates = WeightUpdates(policy, config.weight_broadcast)
        buffer = Buffer(
            {name: environment.num_train for name, environment in environments.items()}, rules_of(config), state
        )
        runner = RolloutRunner(config, pool, tokenizer)
        scheduler = Scheduler(config, environments, buffer, policy, runner, waits, next_batch=state.next_batch)
        metrics = MetricsFile(config.paths.metrics, process="orchestrator")
        stack.callback(metrics.close)
        evaluator = Evaluator(config, evaluated, policy, runner, metrics, waits)
        restore_metrics(config, journal, evaluator, metrics)
        reach("orchestrator.started")
        counts = EnvironmentCounts(environments)
        stack.enter_context(rare_garbage_collection())
        watcher = Watcher(metrics, lambda: {"step": scheduler.next_batch, "process": "now"} | counts.lately())
        status.pool, status.policy, status.scheduler, status.watcher = pool, policy, scheduler, watcher
        yield Orchestrator(
            config=config,
            waits=waits,
            status=status,
            pool=pool,
            journal=journal,
            policy=policy,
            updates=updates,
            buffer=buffer,
            scheduler=scheduler,
            batcher=Batcher(config, scheduler, state, teacher=teacher),
            evaluator=evaluator,
            control=control,
            requests=TrainerRequests(config, journal, policy, updates, scheduler, peers, waits),
            peers=peers,
            metrics=metrics,
            watcher=watcher,
            lanes=lanes,
            environment_counts=counts,
            counters=dict(state.counters),
        )


def _open_journal(config: RunConfig) -> tuple[Journal, State]:
    """A journal that has entries is only continued when asked to."""
    config.paths.journal.mkdir(parents=True, exist_ok=True)
    journal = Journal(config.paths.journal)
    step = config.trainer.ckpt.resume_step
    if step is not None and step >= 0:
        Versions(config.paths.journal).rewind(step)  # first: versions of batches that are no more would be a riddle
        journal.rewind(step)
    elif journal.steps() and not config.resume and step is None:
        raise ConfigError(
            f"{config.paths.journal} holds {len(journal.steps())} batches of an earlier run - an empty folder was "
            "expected. Add --resume to go on with that run, or set another `output_dir` or `name`."
        )
    return journal, journal.head_state()


def is_over(config: RunConfig) -> bool:
    """Whether everything that a run is for lies on disk."""
    last, paths = config.max_steps, config.paths
    evaluation = config.orchestrator.eval
    names = [env.name or env.id for env in (evaluation.env or config.orchestrator.env)] if evaluation else []
    return (
        Journal(paths.journal).has(last - 1)
        and Versions(paths.journal).has(last)
        and all(is_runs_own(results_path(paths, last, name)) for name in names)
        and is_complete(step_folder(paths.checkpoints, last))
    )


def restore_metrics(config: RunConfig, journal: Journal, evaluator: Evaluator, metrics: MetricsFile) -> None:
    """Lines that a crash came before: whatever is in the journal, or evaluated, has its line."""
    rows, _ = read_metrics(config.paths.metrics)
    newest = {step: row for (process, step), row in latest_by_step(rows).items() if process == metrics.process}
    evaluated = {step for step, row in newest.items() if any(name.startswith("eval/") for name in row)}
    steps = journal.steps()
    for step in steps:
        row = newest.get(step, {})
        is_recent = step >= steps[-1] - 1  # after a rewind, the line may be that of the way which was left
        if "reward/mean" not in row or (is_recent and not journal.read(step).metrics.items() <= row.items()):
            metrics.append(step, journal.read(step).metrics)
    for folder in sorted(config.paths.evals.glob("step_*")):
        version = step_of(folder)
        if version is not None and version not in evaluated and evaluator.is_done(version):
            evaluator.report(version)


async def _open_environments(
    config: RunConfig,
    entries: tuple[EnvironmentConfig, ...],
    stack: AsyncExitStack,
    waits: Waits,
    *,
    trained: bool = True,
) -> dict[str, Environment]:
    environments = [
        await stack.enter_async_context(open_environment(entry, logs=config.paths.logs, seed=config.seed, waits=waits))
        for entry in entries
    ]
    for environment in environments:
        log.info("%s: %d training examples, %d held out", environment.name, environment.num_train, environment.num_eval)
        if environment.num_train == 0 and (trained or environment.num_eval == 0):
            raise ConfigError(
                f"The environment {environment.name!r} has no {'training ' if trained else ''}examples - at least one "
                "was expected. Check its `args`."
            )
        if trained:
            environment.check_group_size(config.orchestrator.rollouts_per_example)
    return {environment.name: environment for environment in environments}


async def _environments_to_evaluate(
    config: RunConfig, trained: dict[str, Environment], stack: AsyncExitStack, waits: Waits
) -> dict[str, Environment]:
    """The configured ones, or the held-out part of those that are trained on."""
    evaluation = config.orchestrator.eval
    if evaluation is None:
        return {}
    return await _open_environments(config, evaluation.env, stack, waits, trained=False) if evaluation.env else trained
