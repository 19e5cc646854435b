"""One results file of an evaluation outside a run: what it was made with, what is there, what is missing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.base.errors import ConfigError
from trireme.base.paths import atomic_write
from trireme.config.orchestrator import Evaluation
from trireme.orchestrator.evaluation.results import Answer, AnswersFile, Place, evaluation_metrics
from trireme.tools.environments.check_progress import CheckProgress
from trireme.tools.evaluate.rollouts import Evaluating, together

_ANSWERS_DEPEND_ON = ("env_id", "env_args", "model", "split", "sampling_args", "max_turns", "weights")


@dataclass
class Session:
    """One policy on one environment, and where it is written down.

    Example of its description, which lies beside the results:
        {"env_id": "wordle", "env_args": {}, "model": "Qwen/…", "num_examples": 100, "rollouts_per_example": 4,
         "sampling_args": {"temperature": 1.0}, "split": "eval", "date": "2026-11-21 23:10:00", "time_ms": 81000,
         "finished": true, "avg_reward": 0.41, "avg_metrics": {…}, "metrics": {"avg@4": 0.41, "pass@1": 0.41, …}}
    """

    evaluating: Evaluating
    evaluation: Evaluation
    settings: dict[str, Any]
    results: AnswersFile | None = None  # None: nothing is written
    description: Path | None = None
    answers: dict[Place, Answer] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.evaluating.environment.name

    def begin(self) -> None:
        """Takes up what is there.

        Raises: ConfigError where that was made with other settings, or is somebody else's.
        """
        if self.results is None:
            return
        answered = self.results.answered()
        before = self._described()
        if before is None and (answered or self.results.path.exists()):
            raise ConfigError(
                f"{self.results.path} is there, and no {self._description.name} beside it says how it was made: it is "
                "of the run's own evaluations - expected a folder without it. Add `--output-dir FOLDER`."
            )
        self._check_same(before or {})
        self._check_not_more(answered)
        self.answers = answered
        self.seconds = float((before or {}).get("time_ms") or 0) / 1000

    @property
    def _description(self) -> Path:
        assert self.description is not None
        return self.description

    def _described(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            found = json.loads(self._description.read_text())
            return found if isinstance(found, dict) else None
        return None

    def _check_same(self, before: dict[str, Any]) -> None:
        for key in _ANSWERS_DEPEND_ON:
            if key in before and key in self.settings and before[key] != self.settings[key]:
                raise ConfigError(
                    f"{self._description}: what is there was made with {key} = {before[key]!r}, now it is "
                    f"{self.settings[key]!r} - expected the same, to go on with it. Add `--output-dir` with another "
                    "folder, or remove these results."
                )

    def _check_not_more(self, answered: dict[Place, Answer]) -> None:
        wanted = self.evaluating.wanted
        if beyond := set(answered) - set(wanted.places):
            examples, rollouts = (1 + max(place[axis] for place in beyond) for axis in (0, 1))
            raise ConfigError(
                f"{self._description}: there are results of example {examples - 1} and rollout {rollouts - 1}, and "
                f"{wanted.num_examples} x {wanted.rollouts_per_example} are asked for - expected at least as many as "
                "there are. Ask for more, or name another folder: `--output-dir`."
            )

    @property
    def missing(self) -> list[Place]:
        return self.evaluating.missing(self.answers)

    @property
    def is_done(self) -> bool:
        return not self.missing and (self.results is None or self.results.path.exists())

    def note(self, **settings: Any) -> None:
        """Something that is known only now.

        Raises: ConfigError where it was otherwise when this was begun.
        """
        self.settings |= settings
        self._check_same(self._described() or {} if self.description else {})

    def take(self, answer: Answer) -> None:
        self.answers[answer.example, answer.rollout] = answer
        if self.results is not None:
            self.results.append(answer)

    def finish(self) -> None:
        if self.results is not None:
            self.results.finish(self.answers.values())
        self.describe(finished=True)

    def describe(self, *, finished: bool) -> None:
        if self.description is None:
            return
        wanted = self.evaluating.wanted
        content = self.settings | {
            "num_examples": wanted.num_examples,
            "rollouts_per_example": wanted.rollouts_per_example,
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "time_ms": round(self.seconds * 1000),
            "finished": finished,
        }
        with atomic_write(self.description) as file:
            file.write(json.dumps(content | (self._figures() if finished else {}), indent=1).encode() + b"\n")

    def _figures(self) -> dict[str, Any]:
        metrics = self.metrics
        scored = [answer.metrics for answer in self.answers.values() if answer.reward is not None]
        own = {name for each in scored for name in each}
        return {
            "avg_reward": metrics.get("reward"),
            "avg_metrics": {name: value for name, value in metrics.items() if name in own},
            "metrics": metrics,
        }

    @property
    def metrics(self) -> dict[str, float]:
        """As `eval/ENV/…` of a run."""
        prefix = f"eval/{self.name}/"
        found = evaluation_metrics(self.name, list(self.answers.values()), self.evaluation)
        return {name.removeprefix(prefix): value for name, value in found.items()}


async def answer_missing(sessions: Sequence[Session], progress: CheckProgress) -> None:
    """All of them at once; each is finished as soon as it has everything."""
    total = sum(len(session.missing) for session in sessions)
    limit_s = max(session.evaluating.environment.config.rollout_timeout_s for session in sessions)
    with progress.rewards(total, limit_s=limit_s) as told:

        async def one(session: Session) -> None:
            began, before = time.monotonic(), session.seconds

            def take(answer: Answer) -> None:
                session.seconds = before + time.monotonic() - began
                session.take(answer)
                told(answer.reward)

            session.describe(finished=False)
            await session.evaluating.run(session.missing, take)
            session.finish()

        await together(one(session) for session in sessions if not session.is_done)


def num_failed(sessions: Sequence[Session]) -> int:
    return sum(answer.reward is None for answer in all_answers(sessions))


def all_answers(sessions: Sequence[Session]) -> Iterator[Answer]:
    for session in sessions:
        yield from session.answers.values()
