"""The policy on examples that it is not trained on."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable

from trireme.base.disk import when_there_is_room
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Evaluation
from trireme.config.run import RunConfig
from trireme.monitor.metrics import MetricsFile
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.evaluation.results import (
    Answer,
    AnswersFile,
    evaluation_metrics,
    is_runs_own,
    make_way,
    read_answers,
    results_path,
)
from trireme.orchestrator.evaluation.run import Evaluated, EvaluationRun, places
from trireme.orchestrator.rollout.runner import RolloutRunner
from trireme.orchestrator.weights.policy import Policy

log = get_logger("eval")


class Evaluator:
    """Evaluates versions when they are due. A version stays live until then, for as long as its engines do."""

    def __init__(
        self,
        config: RunConfig,
        environments: dict[str, Environment],
        policy: Policy,
        runner: RolloutRunner,
        metrics: MetricsFile,
        waits: Waits,
    ) -> None:
        self._config = config
        self._eval: Evaluation | None = config.orchestrator.eval
        self._environments = environments
        self._policy = policy
        self._runner = runner
        self._metrics = metrics
        self._waits = waits
        self._num_begun = 0  # evaluations of an environment
        self.version: int | None = None  # that is being evaluated
        policy.expect_evaluations(self.due())

    async def run(self) -> None:
        """Produces `eval/...` metrics; waits for versions; ends after the last one."""
        for version in self.due():
            await self._policy.reached(version)
            is_done = False
            while not is_done:
                async with self._policy.held() as live:
                    is_done = self.is_done(live) or await self.evaluate(live)
            if live > version:
                log.warning("version %d was gone before it was evaluated; version %d was instead", version, live)

    def due(self) -> list[int]:
        """Versions to come that have not been evaluated by the run that this one resumes."""
        if self._eval is None:
            return []
        last = self._config.max_steps
        versions = set(range(0, last, self._eval.interval)) if self._eval.interval else {0}
        if not self._eval.eval_base:
            versions.discard(0)
        return sorted(version for version in versions | {last} if not self.is_done(version))

    def is_done(self, version: int) -> bool:
        """Never where the run evaluates nothing: what lies there is somebody else's."""
        return self._eval is not None and all(
            is_runs_own(results_path(self._config.paths, version, name)) for name in self._environments
        )

    async def evaluate(self, version: int) -> bool:
        """Returns whether it is: not where a later version answered a part, because the engine of this one died."""
        began = time.perf_counter()
        self.version = version
        files = {name: self._answers_file(version, env) for name, env in self._environments.items()}
        try:
            with self._waits.busy():
                results = await asyncio.gather(
                    *(self._one(version, env, files[name]) for name, env in self._environments.items())
                )
        finally:
            self.version = None
        others = set().union(*(result.versions for result in results)) - {version}
        if others:
            log.warning("evaluation of version %d: version %d answered a part of it", version, max(others))
            for file in files.values():
                file.discard()
            return False
        await self._when_there_is_room(lambda: _write_all(files.values(), results), version)
        reach("evaluation.written")
        self.report(version, seconds=time.perf_counter() - began)
        return True

    def report(self, version: int, *, seconds: float | None = None) -> None:
        """Its metrics, from the results on disk.

        Args:
            seconds: how long it took, which the results do not tell.
        """
        assert self._eval is not None
        row: dict[str, float] = {} if seconds is None else {"time/eval": seconds}
        for name in self._environments:
            row |= evaluation_metrics(name, read_answers(results_path(self._config.paths, version, name)), self._eval)
        self._metrics.append(version, row)
        log.info("version %d: %s", version, row)

    def _answers_file(self, version: int, environment: Environment) -> AnswersFile:
        """What has come stands under a name that tells what it depends on: it is gone on with by nothing else."""
        assert self._eval is not None
        depends_on = f"{self._eval.sampling!r} {environment.config!r}"
        path = results_path(self._config.paths, version, environment.name)
        digest = hashlib.sha256(depends_on.encode()).hexdigest()[:8]
        return AnswersFile(path, partial=f".{path.stem}.{digest}.partial")

    async def _one(self, version: int, environment: Environment, file: AnswersFile) -> Evaluated:
        assert self._eval is not None
        self._num_begun += 1
        room = places(
            self._config,
            environment,
            num_environments=len(self._environments),
            is_trained_on=not self._eval.env,
        )
        one_by_one = asyncio.Lock()

        async def keep(answer: Answer) -> None:
            async with one_by_one:
                await self._when_there_is_room(lambda: file.append(answer), version)

        run = EvaluationRun(
            self._config,
            environment,
            self._runner,
            version=version,
            places=room,
            serial=self._num_begun,
            before=await asyncio.to_thread(file.come_so_far),
            keep=keep,
        )
        return await run.run()

    async def _when_there_is_room(self, write: Callable[[], None], version: int) -> None:
        await asyncio.to_thread(
            when_there_is_room,
            write,
            what=f"the evaluation of version {version}",
            folder=self._config.paths.root,
            waits=self._waits,
            deadline_s=self._config.disk_timeout_s,
        )


def _write_all(files: Iterable[AnswersFile], results: Iterable[Evaluated]) -> None:
    reach("evaluation.before_write")
    for file, result in zip(files, results, strict=True):
        make_way(file.path)
        file.finish(result.answers)
