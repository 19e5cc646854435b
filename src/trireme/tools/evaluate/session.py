"""An evaluation outside a run: its environments, and a session for each model on each environment.

A session knows which rollouts are missing, what came of the others, and where that is written.

Example of a description, which lies next to the results:
    {"env_id": "wordle", "env_args": {}, "model": "Qwen/…", "num_examples": 100, "rollouts_per_example": 4,
     "sampling_args": {"temperature": 1.0}, "split": "eval", "date": "2026-11-21 23:10:00", "time_ms": 81000,
     "finished": true, "avg_reward": 0.41, "avg_metrics": {…}, "metrics": {"avg@4": 0.41, "pass@1": 0.41, …}}
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.config.problems import raise_together
from trireme.config.resolve import updated
from trireme.config.rules.orchestrator import evaluation_problems
from trireme.config.run import RunConfig
from trireme.config.sampling import Sampling
from trireme.orchestrator.environments.pool import Environment
from trireme.orchestrator.environments.venv import find_environment
from trireme.orchestrator.evaluation.results import EvalResult, EvalResultsFile, evaluation_metrics
from trireme.orchestrator.rollout.driver import (
    RolloutOutcome,
    gather_or_cancel,
    missing_specs,
    read_extent,
    run_rollouts,
)
from trireme.orchestrator.rollout.runner import RolloutKey, RolloutSpec
from trireme.tools import progress
from trireme.tools.evaluate.config import EvalConfig
from trireme.tools.policies.selection import RolloutPolicy

_RESULTS_DEPEND_ON = ("env_id", "env_args", "model", "split", "sampling_args", "max_turns", "weights", "system_prompt")


class EvalSession:
    """The evaluation of one model on one environment. It writes nothing before `resume` names the files."""

    def __init__(
        self,
        environment: Environment,
        policy: RolloutPolicy,
        config: EvalConfig,
        *,
        settings: dict[str, Any],
        version: int = -1,
    ) -> None:
        """
        Args:
            settings: the description's keys besides those of `config`.
            version: of the policy, if it has one; it tells apart evaluations of this environment in one process.

        Raises: ConfigError if the environment has no examples, or compares another number of rollouts.
        """

        self.environment = environment
        self.policy = policy
        self.config = config
        self.version = version
        self.evaluation = evaluation = config.of(environment.name)
        self.extent = read_extent(
            environment,
            split="eval",
            num_examples=evaluation.num_examples,
            rollouts_per_example=evaluation.rollouts_per_example,
        )
        # the description: results are resumed only under the same settings
        self.settings = settings | {
            "env_id": Path(environment.config.id).name,
            "env_args": environment.config.model_dump(mode="json")["args"],  # TOML has dates, JSON has not
            "sampling_args": _sampling_args(evaluation.sampling, environment),
            "split": self.extent.split,
            "max_turns": environment.config.max_turns,
            "num_examples": len(self.extent.examples),
            "rollouts_per_example": self.extent.rollouts_per_example,
        }

        self.results: dict[RolloutKey, EvalResult] = {}
        self.seconds = 0.0
        self.file: EvalResultsFile | None = None
        self._description: Path | None = None
        self._specs = self.extent.specs("eval" if version < 0 else f"eval-{version}")

    def resume(self, results: Path, description: Path) -> None:
        """Write to these files from now on, and keep the results that they hold.

        Raises: ConfigError if those were made with other settings, or are of the run's own evaluations.
        """
        # results without a description are a run's own, which an evaluation must not add to
        self.file, self._description = EvalResultsFile(results), description
        answered, before = self.file.read_all(), self._read_description()
        if not before and (answered or results.exists()):
            raise ConfigError(
                f"{results} is there, and no {description.name} next to it says how it was made: it is of the run's "
                "own evaluations - expected a folder without it. Add `--output-dir FOLDER`."
            )
        # the same settings, and at least as many rollouts as there are
        self._check_same(before)
        if beyond := set(answered) - {spec.key for spec in self._specs}:
            example, rollout = (max(key[axis] for key in beyond) for axis in (0, 1))
            raise ConfigError(
                f"{description}: there are results of example {example} and rollout {rollout}, and "
                f"{len(self.extent.examples)} x {self.extent.rollouts_per_example} are asked for - expected at least "
                "as many as there are. Ask for more, or name another folder: `--output-dir`."
            )

        self.results = answered
        self.seconds = float(before.get("time_ms") or 0) / 1000

    def note(self, **settings: Any) -> None:
        """Add settings that were not known when the session began.

        Raises: ConfigError if they differ from those of the results that are resumed.
        """
        self.settings |= settings
        self._check_same(self._read_description())

    def _read_description(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = json.loads(self._description.read_text()) if self._description else {}
            return found if isinstance(found, dict) else {}
        return {}

    def _check_same(self, before: dict[str, Any]) -> None:
        for key in _RESULTS_DEPEND_ON:
            if key in before and key in self.settings and before[key] != self.settings[key]:
                raise ConfigError(
                    f"{self._description}: the results there were made with {key} = {before[key]!r}, now it is "
                    f"{self.settings[key]!r} - expected the same, to resume. Add `--output-dir` with another folder, "
                    "or remove these results."
                )

    @property
    def missing(self) -> list[RolloutSpec]:
        return missing_specs(self._specs, self.results, scored_together=self.environment.group_rewards)

    @property
    def is_done(self) -> bool:
        """Return whether all results are there, and the description says so: that is written last."""
        return not self.missing and (self.file is None or self._read_description().get("finished") is True)

    @property
    def num_failed(self) -> int:
        return sum(result.reward is None for result in self.results.values())

    @property
    def metrics(self) -> dict[str, float]:
        """The figures that a run has as `eval/ENV/…`, without that prefix."""
        prefix = f"eval/{self.environment.name}/"
        found = evaluation_metrics(self.environment.name, list(self.results.values()), self.evaluation)
        return {name.removeprefix(prefix): value for name, value in found.items()}

    async def run(self, add_reward: Callable[[float | None], None]) -> None:
        """Make the missing rollouts. Each is on disk, and its reward is added to the progress, as soon as it ended.

        Raises: TriremeError if no other rollout could go better: the engine is gone, the key is wrong.
        """
        began, before = time.monotonic(), self.seconds

        async def keep(outcome: RolloutOutcome) -> None:
            self.seconds = before + time.monotonic() - began
            result = self.results[outcome.spec.key] = EvalResult.of(outcome, version=self.version)
            if self.file is not None:
                self.file.append(result)
            add_reward(result.reward)

        # described as unfinished before the first rollout, and as finished after the last
        self._describe(finished=False)
        await run_rollouts(
            self.missing,
            partial(self.policy.rollout, self.environment),
            keep,
            scored_together=self.environment.group_rewards,
            max_attempts=self.config.max_attempts,
        )
        if self.file is not None:
            self.file.finish(self.results.values())
            self.file.discard()
        self._describe(finished=True)

    def _describe(self, *, finished: bool) -> None:
        if self._description is None:
            return
        # a rollout that failed is made again by the same command, so it is not finished with one
        content = self.settings | {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "time_ms": round(self.seconds * 1000)}
        content["finished"] = finished and not self.num_failed
        # the figures, for tools that read descriptions
        if finished:
            metrics = self.metrics
            own = {name for result in self.results.values() for name in result.metrics}
            content["avg_reward"] = metrics.get("reward")
            content["avg_metrics"] = {name: value for name, value in metrics.items() if name in own}
            content["metrics"] = metrics
        with atomic_write(self._description) as file:
            file.write(json.dumps(content, indent=1).encode() + b"\n")


def _sampling_args(sampling: Sampling, environment: Environment) -> dict[str, Any]:
    """Return how the model is sampled in an environment, as results tell it."""
    kwargs = sampling.chat_template_kwargs | environment.config.chat_template_kwargs
    return updated(sampling, {"chat_template_kwargs": kwargs}).model_dump(exclude_defaults=True, mode="json")


async def run_sessions(sessions: Sequence[EvalSession]) -> None:
    """Make what is missing in all sessions at once; each is finished as soon as it has everything."""
    total = sum(len(session.missing) for session in sessions)
    limit_s = max(session.environment.config.rollout_timeout_s for session in sessions)
    with progress.rewards(total, limit_s=limit_s) as add_reward:
        await gather_or_cancel(session.run(add_reward) for session in sessions if not session.is_done)


# environments


def prepare(config: EvalConfig) -> EvalConfig:
    """Find the environments' folders, give each a name that can be a file's, and limit its concurrent rollouts.

    Raises: ConfigError if one does not exist, two have the same name, or the settings would measure nothing.
    """
    views = [config.of(each.resolved_name) for each in config.env] or [config.evaluation]
    raise_together(problem for view in views for problem in evaluation_problems(view))
    found = []
    for each in config.env:
        values: dict[str, Any] = {
            "id": str(find_environment(each.id).folder or each.id),
            "name": each.file_name,
            "max_concurrent": min(each.max_concurrent, config.max_concurrent),
        }
        if each.model_fields_set & {"rollouts_per_example", "sampling"}:  # its rollouts decide the temperature
            values["sampling"] = config.of(each.resolved_name).sampling
        found.append(updated(each, values))

    names = [str(each.name) for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"{len(names)} environments, and {names.count(twice)} of them are called {twice!r} - expected names "
            'that differ: results go by them. Give each table a `name = "…"`.'
        )
    return config.model_copy(update={"env": tuple(found)})


def rollout_config(config: EvalConfig, **more: Any) -> RunConfig:
    """Return the configuration of a run that makes rollouts in this way, with some `more` keys."""
    own: dict[str, Any] = {
        "orchestrator.sampling": config.evaluation.sampling,
        "orchestrator.env": config.env,
        "orchestrator.engine_timeout_s": config.client.timeout_s,
        "orchestrator.max_concurrent": config.max_concurrent,
        "inference.model.max_model_len": config.model.max_model_len,
        "inference.model.tool_call_parser": config.model.tool_call_parser,
        "inference.model.reasoning_parser": config.model.reasoning_parser,
    }
    return updated(RunConfig(), own | more)
