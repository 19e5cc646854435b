"""Evaluate versions of the policy during a run, on examples that it is not trained on."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Evaluation
from trireme.config.run import RunConfig
from trireme.journal.origin import first_version
from trireme.journal.records import Rollout
from trireme.monitor.metrics import MetricsFile
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.evaluation.results import (
    EvalResult,
    EvalResultsFile,
    evaluation_metrics,
    is_runs_own,
    move_aside,
    read_eval_results,
    results_path,
)
from trireme.orchestrator.rollout.driver import (
    RolloutOutcome,
    gather_or_cancel,
    missing_specs,
    read_extent,
    run_rollouts,
)
from trireme.orchestrator.rollout.runner import RolloutRunner, RolloutSpec
from trireme.orchestrator.weights.policy import Policy

log = get_logger("eval")

SHARE = 4  # without `eval.max_concurrent`, an evaluation runs one rollout for so many slots that training has


@dataclass(eq=False)
class Evaluator:
    """Evaluates versions when they are due.

    Produces: `eval/...` metrics and results files. Waits for: versions, which stay live until they are evaluated, as
    long as their engines live. Ends after the last one.
    """

    config: RunConfig
    environments: dict[str, Environment]
    policy: Policy
    runner: RolloutRunner
    metrics: MetricsFile
    waits: Waits
    version: int | None = None  # the version that is being evaluated
    _num_begun: int = 0  # evaluations of an environment

    def __post_init__(self) -> None:
        self._eval: Evaluation | None = self.config.orchestrator.eval
        self._first = first_version(self.config.paths.root)
        self.policy.expect_evaluations(self.due())

    async def run(self) -> None:
        """Evaluate all versions that are due; a later version in place of one that is no longer live."""
        for version in self.due():
            await self.policy.reached(version)
            # An evaluation that the death of an engine spoiled is repeated with the version that is live then.
            is_done, names = False, self.names_due(version)
            while not is_done:
                async with self.policy.held() as live:
                    is_done = self.is_done(live, names) or await self.evaluate(live, names)
            if live > version:
                log.warning("version %d was gone before it was evaluated; version %d was instead", version, live)

    def due(self) -> list[int]:
        """Return the versions to evaluate, without those that were before this run was resumed."""
        if self._eval is None:
            return []
        last, every = self.config.max_steps, [self._eval.of(name).interval for name in self.environments]
        versions = {self._first, last}.union(*(range(0, last, interval) for interval in every if interval))
        names = {version: self.names_due(version) for version in sorted(versions) if version >= self._first}
        return [version for version, due in names.items() if due and not self.is_done(version, due)]

    def names_due(self, version: int) -> list[str]:
        """Return the environments on which this version is evaluated; on all of them if it is the last."""
        if self._eval is None:
            return []
        first, last = self._first, self.config.max_steps
        return [name for name in self.environments if is_due(self._eval.of(name), version, first=first, last=last)]

    def is_done(self, version: int, names: list[str] | None = None) -> bool:
        """Return whether the run has written results of `version` for these environments, or for any if None.

        Other results may be those of the command `eval`.
        """
        written = {name for name in self.environments if is_runs_own(results_path(self.config.paths, version, name))}
        return self._eval is not None and (bool(written) if names is None else written.issuperset(names))

    async def evaluate(self, version: int, names: list[str] | None = None) -> bool:
        """Evaluate `version` on these environments, all if None, write its results and report its metrics.

        Returns: False if a later version sampled a part of it, because an engine of this one died: the results are
            discarded.
        """
        assert self._eval is not None
        began = time.perf_counter()
        self.version = version
        try:
            with self.waits.busy():
                evaluated = await gather_or_cancel(
                    self._evaluate_environment(version, self.environments[name]) for name in names or self.environments
                )
        finally:
            self.version = None

        # Rollouts that a later version sampled in part say nothing certain about either version.
        others = set().union(*(versions for _, _, versions in evaluated)) - {version}
        if others:
            log.warning("evaluation of version %d: version %d sampled a part of it", version, max(others))
            for file, _, _ in evaluated:
                file.discard()
            return False

        def write_all() -> None:
            reach("evaluation.before_write")
            for file, results, _ in evaluated:
                move_aside(file.path)
                file.finish(results)
            for file, _, _ in evaluated:  # only now: until all are there, an orchestrator that dies reads them again
                file.discard()

        await self._write(write_all, version)
        reach("evaluation.written")

        seconds = time.perf_counter() - began
        self.report(version, {"time/eval": seconds} | await asyncio.to_thread(self.figures, version))
        return True

    def report(self, version: int, row: dict[str, float]) -> None:
        """Write the metrics of `version`."""
        self.metrics.append(version, row)
        shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in row.items())
        log.info("version %d is evaluated: %s", version, shown)

    def figures(self, version: int) -> dict[str, float]:
        """Return the metrics of `version`, from its results on disk."""
        assert self._eval is not None
        row: dict[str, float] = {}
        for name in self.environments:
            path = results_path(self.config.paths, version, name)
            if is_runs_own(path):
                row |= evaluation_metrics(name, read_eval_results(path), self._eval.of(name))
        return row

    async def _evaluate_environment(
        self, version: int, environment: Environment
    ) -> tuple[EvalResultsFile, list[EvalResult], set[int]]:
        """Return the file of its results, these, and the policy versions that sampled any token of them."""
        assert self._eval is not None
        evaluation = self._eval.of(environment.name)

        # The partial file is named by a hash of the configuration, so that no other configuration resumes from it.
        configuration = f"{evaluation.sampling!r} {environment.config!r}"
        digest = hashlib.sha256(configuration.encode()).hexdigest()[:8]
        path = results_path(self.config.paths, version, environment.name)
        file = EvalResultsFile(path, partial=f".{path.stem}.{digest}.partial")
        self._num_begun += 1

        extent = read_extent(
            environment,
            split="eval",
            num_examples=evaluation.num_examples,
            rollouts_per_example=evaluation.rollouts_per_example,
        )
        specs = extent.specs(f"eval-{environment.name}", group_suffix=f"/{self._num_begun}")

        # An evaluation that was killed left its results so far; only the others are rolled out.
        results = await asyncio.to_thread(file.read_partial)
        missing = missing_specs(specs, results, scored_together=environment.group_rewards)
        versions: set[int] = set()
        appending = asyncio.Lock()

        async def roll_out(spec: RolloutSpec) -> Rollout:
            rollout = await self.runner.run(environment, spec, sampling=evaluation.sampling, trained=False)
            reach("evaluation.running")
            return rollout

        async def keep(outcome: RolloutOutcome) -> None:
            result = results[outcome.spec.key] = EvalResult.of(outcome, version=version)
            if outcome.rollout is None:
                return
            versions.update(outcome.rollout.versions)
            # Results of another version must not be in the file that an evaluation of this one resumes from.
            if outcome.rollout.versions <= {version}:
                async with appending:
                    await self._write(lambda: file.append(result), version)

        await run_rollouts(
            missing,
            roll_out,
            keep,
            scored_together=environment.group_rewards,
            max_attempts=self.config.orchestrator.max_rollout_attempts,
            max_concurrent=max_concurrent_rollouts(self.config, environment),
        )

        # In the order of the data, however the rollouts finished.
        ordered = [results[spec.key] for spec in specs]
        if errors := [result.error for result in ordered if result.error is not None]:
            log.warning(
                "%s, version %d: %d of %d rollouts failed %d times each, the first: %s. They are left out of the mean "
                "rewards, count as not passed in pass@k, and stand in the results file with their `error`.",
                environment.name,
                version,
                len(errors),
                len(ordered),
                self.config.orchestrator.max_rollout_attempts,
                errors[0],
            )
        return file, ordered, versions

    async def _write(self, write: Callable[[], None], version: int) -> None:
        what = f"the evaluation of version {version}"
        await asyncio.to_thread(self.runner.wait_for_room, what, self.config.paths.root, write)


def max_concurrent_rollouts(config: RunConfig, environment: Environment) -> int:
    """Return how many rollouts of this environment an evaluation runs at once; the other slots stay training's.

    Rollouts that are scored together wait for each other, so there is room for a group of them in any case.
    """
    evaluation = config.orchestrator.eval
    assert evaluation is not None
    total = evaluation.max_concurrent or config.orchestrator.max_concurrent // SHARE

    own = total // len(evaluation.env or config.orchestrator.env)
    if not evaluation.env:  # those that are trained on
        own = min(own, environment.config.max_concurrent // SHARE)
    return max(own, evaluation.of(environment.name).rollouts_per_example if environment.group_rewards else 1)


def is_due(evaluation: Evaluation, version: int, *, first: int, last: int) -> bool:
    """Return whether a version is evaluated: the last one, each `interval`th, and the first unless it is left out."""
    if version in (first, last):
        return version == last or evaluation.eval_base
    return evaluation.interval is not None and version % evaluation.interval == 0
