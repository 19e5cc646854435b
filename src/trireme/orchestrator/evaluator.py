"""The policy on examples that it is not trained on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from trireme.base.disk import when_there_is_room
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.base.paths import RunPaths, atomic_write, step_folder
from trireme.base.waiting import Waits
from trireme.config.orchestrator import Evaluation
from trireme.config.run import RunConfig
from trireme.monitor.metrics import MetricsFile
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Done
from trireme.orchestrator.environments.worker_process import RolloutFailed
from trireme.orchestrator.policy import Policy
from trireme.orchestrator.rollouts import RolloutRunner

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
        return all(results_path(self._config.paths, version, name).exists() for name in self._environments)

    async def evaluate(self, version: int) -> bool:
        """Returns whether it is: not where a later version answered a part, because the engine of this one died."""
        assert self._eval is not None
        results = await asyncio.gather(*(self._one(self._eval, env) for env in self._environments.values()))
        others = set().union(*(versions for _, versions in results)) - {version}
        if others:
            log.warning("evaluation of version %d: version %d answered a part of it", version, max(others))
            return False
        await asyncio.to_thread(
            when_there_is_room,
            lambda: self._write_all(version, [rewards for rewards, _ in results]),
            what=f"the evaluation of version {version}",
            folder=self._config.paths.root,
            waits=self._waits,
            deadline_s=self._config.disk_timeout_s,
        )
        reach("evaluation.written")
        self.report(version)
        return True

    def report(self, version: int) -> None:
        """Its metrics, from the results on disk."""
        row: dict[str, float] = {}
        for name in self._environments:
            values = [line["reward"] for line in _lines(results_path(self._config.paths, version, name))]
            if values:
                row[f"eval/{name}/reward"] = float(np.mean(values))
                row[f"eval/{name}/std"] = float(np.std(values))
        self._metrics.append(version, row)
        log.info("version %d: %s", version, row)

    def _write_all(self, version: int, results: list[list[Done]]) -> None:
        reach("evaluation.before_write")
        for name, rewards in zip(self._environments, results, strict=True):
            _write(results_path(self._config.paths, version, name), rewards)

    async def _one(self, evaluation: Evaluation, environment: Environment) -> tuple[list[Done], set[int]]:
        """Returns what came of each, and the versions that sampled it."""
        has_own = environment.num_eval > 0
        available = environment.num_eval if has_own else environment.num_train
        examples = range(min(available, evaluation.num_examples or available))
        runs = [(example, place) for example in examples for place in range(evaluation.rollouts_per_example)]

        async def run(example: int, place: int) -> tuple[Done, set[int]] | None:
            try:
                done, samples = await self._runner.run(
                    environment,
                    key=f"eval-{environment.name}-{example}-{place}",
                    split="eval" if has_own else "train",
                    example=example,
                    attempt=0,
                    sampling=evaluation.sampling,
                )
                reach("evaluation.running")
                return done, {int(version) for sample in samples for version in set(sample.versions) if version >= 0}
            except RolloutFailed as failure:
                log.warning(
                    "%s, evaluation example %d: %s; it is left out of the mean", environment.name, example, failure
                )
                return None

        finished = [entry for entry in await asyncio.gather(*(run(*which) for which in runs)) if entry is not None]
        return [done for done, _ in finished], set().union(*(versions for _, versions in finished))


def results_path(paths: RunPaths, version: int, environment: str) -> Path:
    return step_folder(paths.evals, version) / f"{environment.replace('/', '_')}.jsonl"


def _write(path: Path, rewards: list[Done]) -> None:
    """One line per rollout, with the keys that analysis scripts expect (`example_id`, `reward`)."""
    with atomic_write(path) as file:
        for done in rewards:
            line = {
                "example_id": done.example_id,
                "reward": done.reward,
                "prompt": done.prompt,
                "completion": done.completion,
                "answer": done.answer,
                "info": done.info,
                "metrics": done.metrics,
            }
            file.write(json.dumps(line).encode() + b"\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
