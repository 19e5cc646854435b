"""One evaluation of one environment: its examples, so many rollouts of each, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np

from trireme.base.errors import TriremeError
from trireme.base.faults import reach
from trireme.base.log import get_logger
from trireme.config.orchestrator import Evaluation
from trireme.config.run import RunConfig
from trireme.orchestrator.environments.open_rollout import RolloutFailed
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.wire import Split
from trireme.orchestrator.evaluation.results import Answer, Place
from trireme.orchestrator.rollout.runner import Finished, RolloutRunner

log = get_logger("eval")

SHARE = 4
"""Where nothing else is said, evaluations take one in so many of the places that training has too."""


def places(config: RunConfig, environment: Environment, *, num_environments: int, is_trained_on: bool) -> int:
    """Rollouts of this environment that an evaluation has under way at once; the others' places stay training's.

    Rollouts that are scored together wait for each other, so there is room for a group of them in any case.
    """
    evaluation = config.orchestrator.eval
    assert evaluation is not None
    total = evaluation.max_concurrent or config.orchestrator.max_concurrent // SHARE
    own = total // num_environments
    if is_trained_on:
        own = min(own, environment.config.max_concurrent // SHARE)
    return max(own, evaluation.rollouts_per_example if environment.group_rewards else 1)


@dataclass
class Evaluated:
    """What came of it."""

    answers: list[Answer]
    versions: set[int]  # of the policy, that sampled any token of it


class EvaluationRun:
    """Runs once."""

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        runner: RolloutRunner,
        *,
        version: int,
        places: int,
        serial: int,
        before: Mapping[Place, Answer],
        keep: Callable[[Answer], Awaitable[None]],
    ) -> None:
        """
        Args:
            places: rollouts under way at once.
            serial: of all evaluations of this process: the same version may be evaluated twice.
            before: answers of this version that have come already.
            keep: is given each further one, as soon as it comes.
        """
        assert config.orchestrator.eval is not None
        self._evaluation: Evaluation = config.orchestrator.eval
        self._attempts = config.orchestrator.max_rollout_attempts
        self._environment = environment
        self._runner = runner
        self._version = version
        self._serial = serial
        self._places = asyncio.Semaphore(places)
        self._versions: set[int] = set()
        self._before = before
        self._keep = keep

    async def run(self) -> Evaluated:
        groups = await asyncio.gather(*map(self._run_group, self._examples()))
        answers = [answer for group in groups for answer in group]
        self._say_failures(answers)
        return Evaluated(answers, self._versions)

    @property
    def _split(self) -> Split:
        """Its own, or the training examples where it has none: those of `args = {split = "validation"}` for example."""
        return "eval" if self._environment.num_eval else "train"

    def _examples(self) -> range:
        available = self._environment.num_eval or self._environment.num_train
        return range(min(available, self._evaluation.num_examples or available))

    async def _run_group(self, example: int) -> list[Answer]:
        """Where rollouts are scored together and one fails for good, all of them have."""
        places = range(self._evaluation.rollouts_per_example)
        answers = self._come_before(example, places)
        lost: Exception | None = None
        tasks: dict[int, asyncio.Task[Answer]] = {}
        try:
            async with asyncio.TaskGroup() as rollouts:
                for place in places:
                    if place not in answers:
                        tasks[place] = rollouts.create_task(self._run_rollout(example, place))
        except* RolloutFailed as failures:
            lost = failures.exceptions[0]
        if lost is not None:
            return [self._failed(example, place, lost) for place in places]
        answers |= {place: task.result() for place, task in tasks.items()}
        return [answers[place] for place in places]

    def _come_before(self, example: int, places: range) -> dict[int, Answer]:
        """Where rollouts are scored together, all of them or none."""
        answers = {place: self._before[example, place] for place in places if (example, place) in self._before}
        return {} if self._environment.group_rewards and len(answers) < len(places) else answers

    async def _run_rollout(self, example: int, place: int) -> Answer:
        async with self._places:
            for attempt in range(self._attempts):
                try:
                    return await self._roll_out(example, place, attempt)
                except RolloutFailed as failure:
                    last = failure
                except TriremeError:
                    raise
                except Exception as error:
                    log.exception("A rollout of %s, evaluation example %d, broke", self._environment.name, example)
                    last = RolloutFailed("rollout", f"{type(error).__name__}: {error}")
                log.warning("%s, evaluation example %d: %s", self._environment.name, example, last)
        if self._environment.group_rewards:
            raise last
        return self._failed(example, place, last)

    async def _roll_out(self, example: int, place: int, attempt: int) -> Answer:
        name = f"eval-{self._environment.name}-{example}"
        finished = await self._runner.run(
            self._environment,
            key=f"{name}-{place}",
            split=self._split,
            example=example,
            attempt=attempt,
            sampling=self._evaluation.sampling,
            group=f"{name}/{self._serial}",
            group_size=self._evaluation.rollouts_per_example,
            trained=False,
        )
        reach("evaluation.running")
        versions = {
            int(version) for sample in finished.samples for version in np.unique(sample.versions[sample.versions >= 0])
        }
        self._versions |= versions
        answer = self._answered(example, place, finished)
        if versions <= {self._version}:
            await self._keep(answer)
        return answer

    def _answered(self, example: int, place: int, finished: Finished) -> Answer:
        return Answer.of(
            finished.done,
            example=example,
            rollout=place,
            version=self._version,
            tokens=sum(int(sample.loss_mask.sum()) for sample in finished.samples),
            turns=finished.num_turns,
            truncated=finished.truncated,
            stop=finished.stop,
        )

    def _failed(self, example: int, place: int, failure: Exception) -> Answer:
        return Answer.failed(failure, example=example, rollout=place, version=self._version)

    def _say_failures(self, answers: list[Answer]) -> None:
        num_failed = sum(answer.error is not None for answer in answers)
        if num_failed:
            log.warning(
                "%s, version %d: %d of %d rollouts failed %d times each. They are left out of the mean rewards, count "
                "as not passed in pass@k, and stand in the results file with their `error`.",
                self._environment.name,
                self._version,
                num_failed,
                len(answers),
                self._attempts,
            )
