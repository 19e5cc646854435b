"""Results of evaluations: one line per rollout in a file, and the metrics of those lines."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from trireme.algo.pass_at_k import mean_pass_at_k, powers_of_two
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, atomic_write, step_folder
from trireme.config.orchestrator import Evaluation
from trireme.monitor.lines import append_lines
from trireme.monitor.metrics import means
from trireme.orchestrator.rollout.driver import RolloutOutcome
from trireme.orchestrator.rollout.runner import RolloutKey


class EvalResult(msgspec.Struct, kw_only=True):
    """One rollout of an evaluation, as a line of a results file. The first keys are those that analysis scripts expect.

    Example:
        {"example_id": 3, "reward": 0.5, ..., "example": 3, "rollout": 1, "version": 20, "tokens": 87, ...}
        {"example_id": 3, "reward": null, ..., "error": "timeout: not finished after 600 s"}
    """

    example_id: int | str
    reward: float | None  # None if it failed
    prompt: list[dict[str, Any]] = []
    completion: list[dict[str, Any]] = []
    answer: str | None = None
    info: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    example: int = -1  # index in the split; -1 in files that did not say
    rollout: int = 0  # number among the rollouts of that example, from 0
    version: int = -1  # version of the policy that sampled it
    tokens: int = 0  # sampled
    turns: int = 0  # turns of the model
    truncated: bool = False
    stop: str | None = None  # the reason why it ended
    error: str | None = None

    @classmethod
    def of(cls, outcome: RolloutOutcome, **more: Any) -> Self:
        """Build the line of a rollout that ended, with `more` fields (such as `version`)."""
        more |= {"example": outcome.spec.example, "rollout": outcome.spec.rollout}
        rollout = outcome.rollout
        if rollout is None:
            return cls(example_id=outcome.spec.example, reward=None, error=str(outcome.failure), **more)
        own = ("example_id", "reward", "prompt", "completion", "answer", "info", "metrics")
        return cls(
            **{name: getattr(rollout, name) for name in own},
            tokens=rollout.num_sampled or 0,
            turns=rollout.num_turns,
            truncated=rollout.truncated,
            stop=rollout.stop,
            **more,
        )

    @property
    def rollout_key(self) -> RolloutKey:
        return self.example, self.rollout


def results_path(paths: RunPaths, version: int, environment: str) -> Path:
    return step_folder(paths.evals, version) / f"{environment.replace('/', '_')}.jsonl"


def description_path(results: Path) -> Path:
    """Return the file next to results of the command `eval` that says how they were made."""
    return results.with_suffix(".json")


def is_runs_own(results: Path) -> bool:
    """Return whether these results exist and the run made them.

    Those of the command `eval` may be of other examples.
    """
    return results.exists() and not description_path(results).exists()


def move_aside(results: Path) -> None:
    """Rename results of the command `eval` that have the name of the run's own."""
    for path in (results, description_path(results)) if description_path(results).exists() else ():
        if path.exists():
            path.rename(path.with_name(f"{path.stem}.command{path.suffix}"))


class EvalResultsFile:
    """Results of one evaluation, on disk as they come, so that an evaluation that was killed resumes.

    Until all exist they are in `NAME.jsonl.partial`, or in the file `partial` next to that, in the order in which they
    came; then in `NAME.jsonl`, sorted.
    """

    def __init__(self, path: Path, *, partial: str | None = None) -> None:
        self.path = path
        self.partial = path.with_name(partial or f"{path.name}.partial")

    def read_all(self) -> dict[RolloutKey, EvalResult]:
        """Return results of earlier evaluations, the newest of each rollout; without those that failed.

        Raises: ConfigError if a line is no result of an evaluation.
        """
        return _by_key(result for file in (self.path, self.partial) for result in _read_lines(file))

    def read_partial(self) -> dict[RolloutKey, EvalResult]:
        """Return results of an evaluation that was killed, as `read_all`."""
        return _by_key(_read_lines(self.partial))

    def append(self, result: EvalResult) -> None:
        """Raises OSError if the disk is full. `read_partial` leaves out a line that is written in part."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self.partial, deque([_to_line(result)]), sync=False)

    def discard(self) -> None:
        """Remove what has come: it will not be resumed, or `finish` has written all of it."""
        self.partial.unlink(missing_ok=True)

    def finish(self, results: Iterable[EvalResult]) -> None:
        write_eval_results(self.path, sorted(results, key=lambda result: result.rollout_key))


def _by_key(results: Iterable[EvalResult]) -> dict[RolloutKey, EvalResult]:
    return {result.rollout_key: result for result in results if result.reward is not None}


def _read_lines(path: Path) -> Iterator[EvalResult]:
    """Read a results file. Lines of a partial one may be torn if their writer was killed, and are left out."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield msgspec.convert(json.loads(line), EvalResult)
        except (ValueError, RecursionError) as error:
            # A torn line is no JSON. JSON of another shape was written whole, so the file is another one.
            if path.suffix == ".partial" and not isinstance(error, msgspec.ValidationError):
                continue
            raise ConfigError(
                f"{path}, line {number} is no result of an evaluation ({error}) - expected one JSON object per "
                "rollout. Remove the line or the file, and type the same command again."
            ) from None


def write_eval_results(path: Path, results: Iterable[EvalResult]) -> None:
    with atomic_write(path) as file:
        file.writelines(_to_line(result) + b"\n" for result in results)


def _to_line(result: EvalResult) -> bytes:
    return json.dumps(msgspec.to_builtins(result)).encode()


def read_eval_results(path: Path) -> list[EvalResult]:
    return list(_read_lines(path))


def evaluation_metrics(name: str, results: Sequence[EvalResult], evaluation: Evaluation) -> dict[str, float]:
    """Return `eval/NAME/...`. A rollout that failed counts in `error_rate`, in no mean, and has not passed.

    `reward` is the mean over rollouts, avg@k that over examples of the mean of each one's k rollouts. pass@k is over
    the examples with the full number of rollouts, which all of them have in a whole file.
    """
    if not results:
        return {}

    scored = [result for result in results if result.reward is not None]
    groups = _group(results)
    size = max(map(len, groups))  # rollouts per example
    metrics = {"error_rate": 1 - len(scored) / len(results)}

    # pass@k needs the same number of rollouts of each example. One that failed counts as not passed.
    passed = [
        sum(result.reward is not None and result.reward >= evaluation.pass_threshold for result in group)
        for group in groups
        if len(group) == size
    ]
    for k in [k for k in evaluation.pass_at if k <= size] or powers_of_two(size):
        metrics[f"pass@{k}"] = mean_pass_at_k(size, passed, k)

    # Means are over rollouts with a reward. There is none if all have failed.
    if scored:
        metrics |= means(result.metrics for result in scored)
        rewards = np.array([result.reward for result in scored])
        metrics["reward"], metrics["std"] = float(rewards.mean()), float(rewards.std())
        by_example = [np.mean([result.reward for result in group]) for group in _group(scored)]
        metrics[f"avg@{size}"] = float(np.mean(by_example))
        metrics["truncated_frac"] = float(np.mean([result.truncated for result in scored]))
        metrics["tokens_mean"] = float(np.mean([result.tokens for result in scored]))
        metrics["turns_mean"] = float(np.mean([result.turns for result in scored]))
    return {f"eval/{name}/{measure}": value for measure, value in metrics.items()}


def _group(results: Sequence[EvalResult]) -> list[list[EvalResult]]:
    """Group results by example."""
    groups: dict[int | str, list[EvalResult]] = {}
    for result in results:
        groups.setdefault(result.example if result.example >= 0 else result.example_id, []).append(result)
    return list(groups.values())
