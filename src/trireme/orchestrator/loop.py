"""The orchestrator: fill a batch, commit it to the journal, hand it out. `drive` is the main loop.

Tasks run in parallel to the loop: the scheduler issues rollouts, the evaluator evaluates versions, the control server
answers the trainer. If one of them fails, all end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from trireme.algo.data.order import ENDLESS
from trireme.algo.rules import rules_of
from trireme.algo.weight_checks import POLICY
from trireme.base.background import with_pauses
from trireme.base.disk import when_there_is_room
from trireme.base.errors import ConfigError, TriremeError
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.paths import set_aside_after, step_folder, steps_in
from trireme.base.processes import rare_garbage_collection
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.config.orchestrator import Teacher as TeacherConfig
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.manifest import is_complete
from trireme.journal.records import BatchRecord, State
from trireme.journal.versions import Versions
from trireme.monitor.metrics import MetricsFile, latest_by_step, read_in_pieces
from trireme.monitor.spans import open_spans
from trireme.orchestrator.batch_metrics import metrics_in_parts, state_metrics
from trireme.orchestrator.batcher import Batcher, Filled
from trireme.orchestrator.buffer import Buffer
from trireme.orchestrator.engines.expert_routes import experts_to_replay
from trireme.orchestrator.engines.health import keep_engines
from trireme.orchestrator.engines.joined import JoinedEngines
from trireme.orchestrator.engines.pool import InferencePool, open_inference_pool
from trireme.orchestrator.environments.pool import Environment, open_environment
from trireme.orchestrator.evaluation.evaluator import Evaluator
from trireme.orchestrator.evaluation.results import is_runs_own, results_path
from trireme.orchestrator.lanes import Lanes
from trireme.orchestrator.rollout.chat import ChatTokenizer, open_chat_tokenizer
from trireme.orchestrator.rollout.runner import RolloutRunner
from trireme.orchestrator.scheduler import Scheduler
from trireme.orchestrator.self_distillation import SelfTeacher
from trireme.orchestrator.status import Status, serve_status
from trireme.orchestrator.teacher import Teacher, open_teacher
from trireme.orchestrator.trainer_requests import Peers, TrainerRequests
from trireme.orchestrator.watcher import Watcher
from trireme.orchestrator.weights.policy import Policy
from trireme.orchestrator.weights.update import WeightUpdates
from trireme.transport.control import ControlServer

log = get_logger("orchestrator")

TRAINER_EXIT_S = 30.0  # a trainer that has saved everything and sends nothing for this long has exited


def orchestrate(config: RunConfig) -> None:
    """Run until the last version is live and evaluated, and the trainer has exited."""
    import uvloop

    async def open_and_drive() -> None:
        async with open_orchestrator(config) as orchestrator:
            await drive(orchestrator)

    if config.trainer.ckpt.resume_step in (None, -1) and is_over(config):  # any other step makes the run go back first
        log.info("all %d steps are trained, confirmed, evaluated and saved: nothing is left to do", config.max_steps)
        return
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # with Python's own a rollout costs more
            runner.run(open_and_drive())
    except* TriremeError as group:
        # Task groups nest. The user is shown the first error itself, not a tree of groups.
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def drive(o: Orchestrator) -> None:
    """Make all batches from the next to the last."""
    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(o.control.serve(o.requests)),
            tasks.create_task(o.status.keep_beating()),
            tasks.create_task(keep_engines(o.pool, o.policy.admit, o.config.inference.start_timeout_s)),
            tasks.create_task(o.joined.run()),
            tasks.create_task(o.scheduler.run()),
            tasks.create_task(o.updates.fail_on_wrong_weights()),
            tasks.create_task(o.watcher.run()),
            tasks.create_task(o.lanes.keep(o.policy, o.scheduler, o.evaluator)),
        ]

        # The evaluator ends by itself after the last version; the other tasks run until they are cancelled.
        evaluation = tasks.create_task(o.evaluator.run())
        o.status.state = "running"
        while o.scheduler.next_batch < o.config.max_steps:
            await o.next_batch()
        await o.finish(evaluation)
        for task in background:
            task.cancel()


class Orchestrator:
    """The parts of a running orchestrator, once they are open."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.waits = Waits("orchestrator", config.paths.logs)
        self.peers = Peers()
        self.waits.is_peer_busy = self.peers.is_any_busy
        self.status = Status(config, self.waits, self.peers)

    async def open(self, stack: AsyncExitStack) -> None:
        """Open everything in the order in which it is needed.

        Raises: ConfigError if the run, as it is configured, cannot begin or be resumed.
        """
        config, waits, status = self.config, self.waits, self.status

        # The status server comes first: it shows what the rest of the start waits for.
        stack.enter_context(serve_status(status, config.orchestrator.server))
        self.control = ControlServer(config.hosts.orchestrator, config.ports.batches or 0)
        stack.callback(self.control.close)
        reach("orchestrator.starting")

        # The journal's state says where the run continues; the buffer, the scheduler and the batcher start from it.
        self.journal = journal = _open_journal(config)
        state = journal.head_state()
        self.counters = dict(state.counters)

        # The pool needs the tokenizer's vocabulary and the model's sizes, to check what engines answer.
        tokenizer = open_chat_tokenizer(
            config.trainer.tokenizer.name or config.model.name, trust_remote_code=config.trainer.model.trust_remote_code
        )
        pool = await stack.enter_async_context(
            open_inference_pool(
                config.engine_urls,
                waits=waits,
                max_model_len=config.inference.model.max_model_len or config.seq_len,
                timeout_s=config.orchestrator.engine_timeout_s,
                request_timeout_s=config.orchestrator.request_timeout_s,
                max_concurrent=config.orchestrator.max_concurrent,
                vocab_size=tokenizer.vocab_size,
                adapter=POLICY if config.serves_adapters else None,
                experts=experts_to_replay(config, tokenizer.model_config),
                keeps_top_logprobs=config.num_top_logprobs > 0,
                shares_prefixes=config.shares_prefixes,
                keep_prefix_cache=config.inference.keep_prefix_cache,
            )
        )
        self.pool = pool
        self.lanes = Lanes(config, stack.enter_context(open_spans(config.paths.spans)), pool)

        # Teacher and environments are checked as they open, so that a mistake in them ends the run before any rollout.
        teachers = await _open_teachers(config, stack, waits, tokenizer, pool)
        self.environments = environments = await _open_environments(
            config, config.orchestrator.env, stack, waits, trained=True
        )
        self._reported = {name: Counter[str]() for name in environments}
        evaluation = config.orchestrator.eval
        evaluated = environments if evaluation else {}  # their held-out examples, unless the run names others
        if evaluation and evaluation.env:
            evaluated = await _open_environments(config, evaluation.env, stack, waits, trained=False)

        self.metrics = MetricsFile(config.paths.metrics, process="orchestrator")
        stack.callback(self.metrics.close)
        self._assemble(state, tokenizer, teachers, evaluated)

        # The status server runs in a thread of its own and has answered without these parts so far.
        status.pool, status.policy, status.scheduler, status.watcher = pool, self.policy, self.scheduler, self.watcher

        # A crash may have kept the last metrics from their file. The journal and the results still have them.
        restore_metrics(config, journal, self.evaluator, self.metrics)
        reach("orchestrator.started")
        stack.enter_context(rare_garbage_collection())

    def _assemble(
        self,
        state: State,
        tokenizer: ChatTokenizer,
        teachers: dict[str, Teacher | SelfTeacher],
        evaluated: dict[str, Environment],
    ) -> None:
        """Build the parts that open nothing, in the order in which a rollout meets them."""
        config, pool, waits = self.config, self.pool, self.waits

        # No version is live yet: the trainer publishes one, or an engine shows that it still serves the newest.
        self.policy = policy = Policy(
            pool,
            waits,
            Versions(config.paths.journal),
            disk_timeout_s=config.disk_timeout_s,
        )
        self.updates = WeightUpdates(policy, config.weight_broadcast)
        self.joined = JoinedEngines(config, pool, policy.admit)

        # Rollouts go from the buffer's examples through the scheduler's groups to the batcher's batches.
        sizes = {name: environment.num_train for name, environment in self.environments.items()}
        self.buffer = Buffer(sizes, rules_of(config), state)
        judges = {name: each for name, each in teachers.items() if not each.config.samples}
        samplers = {name: each for name, each in teachers.items() if isinstance(each, Teacher) and each.config.samples}
        runner = RolloutRunner(config, pool, tokenizer, journal=config.paths.journal, waits=waits, teachers=samplers)
        self.scheduler = Scheduler(
            config,
            self.environments,
            self.buffer,
            policy,
            runner,
            waits,
            next_batch=state.next_batch,
            tokens_per_rollout=state.tokens_per_rollout,
        )
        self.batcher = Batcher(config, self.scheduler, state, judges)

        # The evaluator registers the versions that it needs here, before any of them can go live and be replaced.
        self.evaluator = Evaluator(config, evaluated, policy, runner, self.metrics, waits)
        self.requests = TrainerRequests(
            config, self.journal, policy, self.updates, self.scheduler, self.peers, waits, self.joined
        )
        self.watcher = Watcher(self.metrics)

    async def next_batch(self) -> None:
        """Fill one batch and commit it to the journal before the trainer can fetch it."""
        step = self.scheduler.next_batch
        began = time.perf_counter()
        batch = await self.batcher.fill(step)
        filled = time.perf_counter()

        with self.lanes.closing(step):
            record = self._close(step, batch)

            # Computing the metrics takes a while, so it is done in parts between which the event loop runs.
            parts = metrics_in_parts(step, batch.rollouts, batch.dropped, config=self.config, outcomes=batch.outcomes)
            async for part in with_pauses(parts):
                record.metrics |= part
            record.metrics |= state_metrics(record.state, config=self.config)
            reach("journal.before_append")
            await asyncio.to_thread(  # a full disk makes this wait: no trainer has seen the batch
                when_there_is_room,
                lambda: self.journal.append(record),
                what=f"batch {step}",
                folder=self.config.paths.journal,
                waits=self.waits,
                deadline_s=self.config.disk_timeout_s,
            )
            reach("journal.appended")

            # Only now may the trainer have the batch: what it trains on survives a crash.
            self.scheduler.batch_closed()
            self.requests.batch_closed()

            # Times and failures are of this process, so they go to the metrics file and not into the journal.
            metrics = record.metrics | self._take_failures() | self.updates.take_seconds()
            metrics |= {"time/fill_batch": filled - began, "time/journal": time.perf_counter() - filled}
            metrics |= {"perf/engine_idle_frac": self.lanes.idle_frac()} | self.pool.window.take_metrics()

        self.metrics.append(step, metrics)
        log.info("batch %d  reward %.3f  lag %.2f", step, metrics["reward/mean"], metrics["lag/mean"])

    def _close(self, step: int, batch: Filled) -> BatchRecord:
        """Build the journal's entry, but its metrics. Synchronous: groups that are taken from now on belong to the next
        batch."""
        rollouts, dropped = batch.rollouts, batch.dropped

        # The state is what a restart continues from, so the counters and the buffer come first.
        self.counters["trained"] = self.counters.get("trained", 0) + len(rollouts)
        self.counters["dropped"] = self.counters.get("dropped", 0) + len(dropped)
        self.buffer.close_batch(batch.outcomes, next_step=step + 1)
        state = State(
            next_batch=step + 1,
            open_groups=self.scheduler.open_groups(),
            counters=self.counters,
            baselines=batch.baselines,
            tokens_per_rollout=self.scheduler.mean_tokens,
            **self.buffer.state(),
        )
        return BatchRecord(
            step=step,
            rollouts=rollouts,
            dropped=dropped,
            state=state,
            rules=rules_of(self.config),
            outcomes=batch.outcomes,
        )

    def _take_failures(self) -> dict[str, float]:
        """Return failures of environments and their workers since the batch before, without those that are 0."""
        metrics: dict[str, float] = {}
        for name, environment in self.environments.items():
            counts = Counter(environment.counts)
            metrics |= {f"env/{name}/{what}": count for what, count in (counts - self._reported[name]).items()}
            self._reported[name] = counts
        return metrics

    async def finish(self, evaluation: asyncio.Task) -> None:
        """Wait until the last version is live and evaluated, then let the trainer exit. Until then it may be needed."""
        self.status.state = "finishing"
        deadline_s = self.config.orchestrator.trainer_timeout_s
        what = f"version {self.config.max_steps}"
        with self.waits.waiting(what, peer="trainer", deadline_s=deadline_s, patient=True) as wait:
            while not (evaluation.done() and self.policy.version >= self.config.max_steps):
                wait.note = "to evaluate it" if self.policy.version < self.config.max_steps else "it is being evaluated"
                wait.check()
                await asyncio.sleep(0.05)
        reach("orchestrator.finishing")
        self.peers.trainer_may_leave.set()

        # the trainer may exit without sending `Done`, after it saved everything
        with self.waits.waiting("its `Done`", peer="trainer", deadline_s=deadline_s, patient=True) as wait:
            while not (self.peers.has_trainer_left or (wait.waited_s > TRAINER_EXIT_S and is_over(self.config))):
                wait.check()
                await asyncio.sleep(0.05)
        await self.joined.dismiss()
        await asyncio.sleep(0.2)  # the answer to `Done` is on its way
        self.status.state = "done"


@asynccontextmanager
async def open_orchestrator(config: RunConfig) -> AsyncIterator[Orchestrator]:
    """Open an orchestrator; close its parts in reverse, however the block ends."""
    async with AsyncExitStack() as stack:
        orchestrator = Orchestrator(config)
        await orchestrator.open(stack)
        yield orchestrator


def _open_journal(config: RunConfig) -> Journal:
    """Open the journal, and go back to `resume_step` there and in evaluations. The command has refused one of another
    run."""
    config.paths.journal.mkdir(parents=True, exist_ok=True)
    journal = Journal(config.paths.journal)
    step = config.trainer.ckpt.resume_step
    if step is not None and step >= 0:
        Versions(config.paths.journal).rewind(step)  # first: no version may outlive the batch that made it
        set_aside_after(config.paths.evals, step)
        journal.rewind(step)
    return journal


async def _open_teachers(
    config: RunConfig, stack: AsyncExitStack, waits: Waits, tokenizer: ChatTokenizer, pool: InferencePool
) -> dict[str, Teacher | SelfTeacher]:
    """Open the teacher of each source that has one; sources with the same settings share it."""
    own_teachers = {name: own.teacher for name, own in config.orchestrator.sources.items() if own.teacher}
    opened: dict[TeacherConfig, Teacher | SelfTeacher] = {
        each: SelfTeacher(each, tokenizer, pool, waits)
        if each.demonstration is not None
        else await stack.enter_async_context(open_teacher(each, tokenizer, waits, max_model_len=pool.max_model_len))
        for each in dict.fromkeys(own_teachers.values())
    }
    return {name: opened[own] for name, own in own_teachers.items()}


async def _open_environments(
    config: RunConfig, entries: tuple[EnvironmentConfig, ...], stack: AsyncExitStack, waits: Waits, *, trained: bool
) -> dict[str, Environment]:
    how: dict[str, Any] = {"seed": config.seed, "waits": waits, "is_evaluation": not trained}
    how["shows_pictures"] = config.trainer.model.vlm is not None
    environments = [
        await stack.enter_async_context(open_environment(entry, logs=config.paths.logs, **how)) for entry in entries
    ]

    for environment in environments:
        num_train = "endless" if environment.num_train == ENDLESS else environment.num_train
        log.info("%s: %s training examples, %d held out", environment.name, num_train, environment.num_eval)
        # An evaluation takes training examples if none are held out, so it needs either kind.
        if environment.num_train == 0 and (trained or environment.num_eval == 0):
            raise ConfigError(
                f"The environment {environment.name!r} has no {'training ' if trained else ''}examples - at least one "
                "was expected. Check its `args`."
            )
        if trained:
            environment.check_group_size(config.orchestrator.of(environment.name).rollouts_per_example)
    return {environment.name: environment for environment in environments}


def is_over(config: RunConfig) -> bool:
    """Return whether all results of a run are on disk."""
    last, paths = config.max_steps, config.paths
    evaluation = config.orchestrator.eval
    names = [env.resolved_name for env in (evaluation.env or config.orchestrator.env)] if evaluation else []
    return (
        Journal(paths.journal).has(last - 1)
        and Versions(paths.journal).has(last)
        and all(is_runs_own(results_path(paths, last, name)) for name in names)
        and is_complete(step_folder(paths.checkpoints, last))
    )


def restore_metrics(config: RunConfig, journal: Journal, evaluator: Evaluator, metrics: MetricsFile) -> None:
    """Append the metrics of batches and evaluations that a crash kept from the file."""
    rows = (row for piece, _ in read_in_pieces(config.paths.metrics) for row in piece)
    own = latest_by_step(row for row in rows if row["process"] == metrics.process)
    newest = {step: row for (_, step), row in own.items()}
    evaluated = {step for step, row in newest.items() if any(name.startswith("eval/") for name in row)}

    # Batches: the line may be missing, or be from before the run went back to an earlier step.
    steps = journal.steps()
    for step in steps:
        row = newest.get(step, {})
        is_recent = step >= steps[-1] - 1  # after a rewind, the line may be from before it
        if "reward/mean" not in row or (is_recent and not journal.read(step).metrics.items() <= row.items()):
            metrics.append(step, journal.read(step).metrics)

    # Evaluations: the same, from their results on disk.
    versions = [version for version in steps_in(config.paths.evals) if evaluator.is_done(version)]
    for version in versions:
        is_newest = version == versions[-1]  # after a rewind, the line may be from before it
        if version not in evaluated or is_newest:
            row = evaluator.figures(version)
            if not row.items() <= newest.get(version, {}).items():
                evaluator.report(version, row)
