"""The policy on examples that it is not trained on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np

from trireme.base.log import get_logger
from trireme.base.paths import atomic_write, step_folder
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
    """Evaluates versions when they are due. A version stays live until its evaluation is finished."""

    def __init__(
        self,
        config: RunConfig,
        environments: dict[str, Environment],
        policy: Policy,
        runner: RolloutRunner,
        metrics: MetricsFile,
    ) -> None:
        self._config = config
        self._eval: Evaluation | None = config.orchestrator.eval
        self._environments = environments
        self._policy = policy
        self._runner = runner
        self._metrics = metrics

    async def run(self) -> None:
        """Produces `eval/...` metrics; waits for versions; ends after the last one."""
        if self._eval is None:
            return
        for version in self._due(self._eval):
            await self._policy.reached(version)
            async with self._policy.held() as live:
                if not self._is_done(live):
                    await self.evaluate(live)

    def _due(self, evaluation: Evaluation) -> list[int]:
        """Versions to come that have not been evaluated by the run that this one resumes."""
        last = self._config.max_steps
        versions = set(range(0, last, evaluation.interval)) if evaluation.interval else {0}
        if not evaluation.eval_base:
            versions.discard(0)
        return sorted(version for version in versions | {last} if not self._is_done(version))

    def _is_done(self, version: int) -> bool:
        return all(self._results(version, name).exists() for name in self._environments)

    async def evaluate(self, version: int) -> None:
        assert self._eval is not None
        results = await asyncio.gather(*(self._one(self._eval, env) for env in self._environments.values()))
        row: dict[str, float] = {}
        for environment, rewards in zip(self._environments.values(), results, strict=True):
            self._write(version, environment.name, rewards)
            values = [done.reward for _, done in rewards]
            if values:
                row[f"eval/{environment.name}/reward"] = float(np.mean(values))
                row[f"eval/{environment.name}/std"] = float(np.std(values))
        self._metrics.append(version, row)
        log.info("version %d: %s", version, row)

    async def _one(self, evaluation: Evaluation, environment: Environment) -> list[tuple[int, Done]]:
        has_own = environment.num_eval > 0
        available = environment.num_eval if has_own else environment.num_train
        examples = range(min(available, evaluation.num_examples or available))
        runs = [(example, place) for example in examples for place in range(evaluation.rollouts_per_example)]

        async def run(example: int, place: int) -> tuple[int, Done] | None:
            try:
                done, _ = await self._runner.run(
                    environment,
                    key=f"eval-{environment.name}-{example}-{place}",
                    split="eval" if has_own else "train",
                    example=example,
                    attempt=0,
                    sampling=evaluation.sampling,
                )
                return example, done
            except RolloutFailed as failure:
                log.warning(
                    "%s, evaluation example %d: %s; it is left out of the mean", environment.name, example, failure
                )
                return None

        finished = await asyncio.gather(*(run(*which) for which in runs))
        return [entry for entry in finished if entry is not None]

    def _results(self, version: int, name: str) -> Path:
        return step_folder(self._config.paths.evals, version) / f"{name.replace('/', '_')}.jsonl"

    def _write(self, version: int, name: str, rewards: list[tuple[int, Done]]) -> None:
        """One line per rollout, with the keys that analysis scripts expect (`example_id`, `reward`)."""
        with atomic_write(self._results(version, name)) as file:
            for _, done in rewards:
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
