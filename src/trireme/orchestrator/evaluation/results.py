"""One line per rollout of an evaluation, and the metrics of those lines: from disk as from memory, the same numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from trireme.algo.pass_at_k import mean_pass_at_k, powers_of_two
from trireme.base.errors import ConfigError
from trireme.base.paths import RunPaths, atomic_write, step_folder
from trireme.config.orchestrator import Evaluation
from trireme.monitor.metrics import means
from trireme.orchestrator.rollout.driver import Outcome, RolloutKey


class EvalResult(msgspec.Struct, kw_only=True):
    """One rollout of an evaluation, as a line of a results file. The first keys are those that analysis scripts expect.

    Example:
        {"example_id": 3, "reward": 0.5, ..., "example": 3, "rollout": 1, "version": 20, "tokens": 87, ...}
        {"example_id": 3, "reward": null, ..., "error": "timeout: not finished after 600 s"}
    """

    example_id: int | str
    reward: float | None  # None where it failed
    prompt: list[dict[str, Any]] = []
    completion: list[dict[str, Any]] = []
    answer: str | None = None
    info: dict[str, Any] = {}
    metrics: dict[str, float] = {}
    example: int = -1  # index in the split; -1 in files that did not say
    rollout: int = 0  # of that example, from 0
    version: int = -1  # of the policy
    tokens: int = 0  # sampled
    turns: int = 0  # of the model
    truncated: bool = False
    stop: str | None = None  # what ended it
    error: str | None = None

    @classmethod
    def of(cls, outcome: Outcome, **more: Any) -> Self:
        """Build the line of a rollout that ended, with `more` fields (such as `version`)."""
        more |= {"example": outcome.spec.example, "rollout": outcome.spec.rollout}
        finished = outcome.finished
        if finished is None:
            return cls(example_id=outcome.spec.example, reward=None, error=str(outcome.failure), **more)
        own = ("example_id", "reward", "prompt", "completion", "answer", "info", "metrics")
        return cls(
            **{name: getattr(finished.done, name) for name in own},
            tokens=finished.num_sampled or 0,
            turns=finished.num_turns,
            truncated=finished.truncated,
            stop=finished.stop,
            **more,
        )

    @property
    def rollout_key(self) -> RolloutKey:
        return self.example, self.rollout

    @property
    def group(self) -> int | str:
        return self.example if self.example >= 0 else self.example_id


def results_path(paths: RunPaths, version: int, environment: str) -> Path:
    return step_folder(paths.evals, version) / f"{environment.replace('/', '_')}.jsonl"


def description_path(results: Path) -> Path:
    """Beside the results of the command `eval`: how they were made."""
    return results.with_suffix(".json")


def is_runs_own(results: Path) -> bool:
    """Whether it is there, and made by the run. What the command `eval` left may be of fewer examples, or of others."""
    return results.exists() and not description_path(results).exists()


def make_way(results: Path) -> None:
    """What the command `eval` left under the name that the run's own results are to have gets another one."""
    for path in (results, description_path(results)) if description_path(results).exists() else ():
        if path.exists():
            path.rename(path.with_name(f"{path.stem}.command{path.suffix}"))


class EvalResultsFile:
    """Answers as they come, each on disk at once; what was killed goes on where it stopped.

    Until all are there they stand in `NAME.jsonl.partial`, in the order in which they came; then in `NAME.jsonl`.
    """

    def __init__(self, path: Path, *, partial: str | None = None) -> None:
        """
        Args:
            partial: another name for the file with those that have come.
        """
        self.path = path
        self.partial = path.with_name(partial or f"{path.name}.partial")
        self._is_whole = False  # the last line, as far as is known

    def answered(self) -> dict[RolloutKey, EvalResult]:
        """Of earlier evaluations. Where a rollout was tried again, the newest; those that failed are to be again.

        Raises: ConfigError where a line is none of ours.
        """
        return _by_key(answer for file in (self.path, self.partial) for answer in _read_answered(file))

    def read_partial(self) -> dict[RolloutKey, EvalResult]:
        """As `answered`, of an evaluation that was cut short."""
        return _by_key(_read_answered(self.partial))

    def append(self, answer: EvalResult) -> None:
        """Raises OSError where the disk is full; then nothing is written."""
        if not self._is_whole:
            self._begin()
        size = self.partial.stat().st_size if self.partial.exists() else 0
        try:
            with open(self.partial, "ab") as file:
                file.write(_to_line(answer))
        except OSError:
            with suppress(OSError):
                os.truncate(self.partial, size)
            raise

    def _begin(self) -> None:
        """After what somebody who was killed has left."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.partial.exists() and not self.partial.read_bytes().endswith(b"\n"):
            with open(self.partial, "ab") as file:
                file.write(b"\n")
        self._is_whole = True

    def discard(self) -> None:
        """What has come will not be gone on with."""
        self.partial.unlink(missing_ok=True)

    def finish(self, answers: Iterable[EvalResult]) -> None:
        write_eval_results(self.path, sorted(answers, key=lambda answer: answer.rollout_key))
        self.partial.unlink(missing_ok=True)


def _by_key(answers: Iterable[EvalResult]) -> dict[RolloutKey, EvalResult]:
    return {answer.rollout_key: answer for answer in answers if answer.reward is not None}


def _read_answered(path: Path) -> Iterator[EvalResult]:
    """Lines of a partial file may be torn: their writers were killed."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (path.suffix == ".partial" and _is_torn(line)):
            continue
        try:
            yield msgspec.convert(json.loads(line), EvalResult)
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{path}, line {number} is no result of an evaluation ({error}) - expected one JSON object per rollout."
                " Remove the line or the file, and type the same command again."
            ) from None


def _is_torn(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def write_eval_results(path: Path, answers: Iterable[EvalResult]) -> None:
    with atomic_write(path) as file:
        file.writelines(map(_to_line, answers))


def _to_line(answer: EvalResult) -> bytes:
    return json.dumps(msgspec.to_builtins(answer)).encode() + b"\n"


def read_eval_results(path: Path) -> list[EvalResult]:
    return [msgspec.convert(json.loads(line), EvalResult) for line in path.read_bytes().splitlines()]


def evaluation_metrics(name: str, answers: Sequence[EvalResult], evaluation: Evaluation) -> dict[str, float]:
    """`eval/NAME/...`. What failed has no reward: it is in `error_rate`, left out of the means, and has not passed."""
    if not answers:
        return {}
    scored = [answer for answer in answers if answer.reward is not None]
    metrics = {"error_rate": 1 - len(scored) / len(answers)} | _passed(answers, evaluation)
    if scored:
        metrics |= means(answer.metrics for answer in scored) | _rewards(answers, scored)
        metrics["truncated_frac"] = float(np.mean([answer.truncated for answer in scored]))
        metrics["tokens_mean"] = float(np.mean([answer.tokens for answer in scored]))
        metrics["turns_mean"] = float(np.mean([answer.turns for answer in scored]))
    return {f"eval/{name}/{measure}": value for measure, value in metrics.items()}


def _rewards(answers: Sequence[EvalResult], scored: Sequence[EvalResult]) -> dict[str, float]:
    """`reward` is the mean over rollouts, avg@k that over examples of the mean of each one's k rollouts."""
    rewards = np.array([answer.reward for answer in scored])
    per_example = [np.mean([answer.reward for answer in group]) for group in _groups(scored).values()]
    return {
        "reward": float(rewards.mean()),
        "std": float(rewards.std()),
        f"avg@{_most(answers)}": float(np.mean(per_example)),
    }


def _passed(answers: Sequence[EvalResult], evaluation: Evaluation) -> dict[str, float]:
    """pass@k over the examples with the full number of rollouts, which all of them have in a whole file."""
    most = _most(answers)
    counts = [
        sum(answer.reward is not None and answer.reward >= evaluation.pass_threshold for answer in group)
        for group in _groups(answers).values()
        if len(group) == most
    ]
    wanted = [k for k in evaluation.pass_at if k <= most] or powers_of_two(most)
    return {f"pass@{k}": mean_pass_at_k(most, counts, k) for k in wanted}


def _most(answers: Sequence[EvalResult]) -> int:
    """Rollouts per example."""
    return max(map(len, _groups(answers).values()))


def _groups(answers: Sequence[EvalResult]) -> dict[int | str, list[EvalResult]]:
    groups: dict[int | str, list[EvalResult]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    return groups
