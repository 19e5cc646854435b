"""All that a page tells of, read once from a run's folder. The run may be going on, or have been killed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trireme.base.paths import RunPaths, step_of
from trireme.config.files import find_run_file, read_run, read_table
from trireme.config.run import RunConfig
from trireme.config.sft import SftConfig
from trireme.journal.journal import Journal
from trireme.journal.provenance import read_provenance
from trireme.monitor.metrics import Row, read_metrics
from trireme.monitor.progress import Progress
from trireme.monitor.spans import read_spans

Points = list[tuple[float, float]]


class Facts:
    """Of one run, of reinforcement learning or of supervised training."""

    def __init__(self, folder: Path) -> None:
        """Raises: ConfigError where it is not a run's."""
        file = find_run_file(folder, "trainer")
        self.folder = folder
        self.paths = RunPaths(folder)
        self.rl: RunConfig | None = read_run(RunConfig, file) if _is_rl(file) else None
        self.config: RunConfig | SftConfig = self.rl or read_run(SftConfig, file)
        rows = read_metrics(self.paths.metrics)[0]
        self.progress = Progress(self.config.max_steps)
        self.progress.add(rows)
        self.times_s = [row["time_s"] for row in rows if isinstance(row.get("time_s"), int | float)]
        self.journal = Journal(self.paths.journal)
        self.batches = self.journal.steps()
        self.spans = read_spans(self.paths.spans)[0]
        self.surroundings = read_provenance(self.paths)

    @property
    def name(self) -> str:
        return self.config.name or self.folder.resolve().name

    @property
    def names(self) -> list[str]:
        """Of all metrics."""
        rows = (row for processes in self.progress.steps.values() for row in processes.values())
        return sorted({name for row in rows for name in row})

    def points(self, name: str, process: str | None = None) -> Points:
        """Steps, counted from 1 as the terminal counts them, and values; NaN where the number was not finite."""
        found = []
        for step in sorted(self.progress.steps):
            for who, row in self.progress.steps[step].items():
                if name in row and process in (None, who):
                    found.append((step + 1.0, _number(row[name])))
        return found

    def row(self, process: str, step: int) -> Row:
        return self.progress.steps.get(step, {}).get(process, {})

    def evaluated(self) -> dict[str, Points]:
        """Rewards of versions, by environment."""
        found: dict[str, Points] = {}
        for evaluation in self.progress.evaluations():
            found.setdefault(evaluation.env, []).append((float(evaluation.version), evaluation.reward))
        return found

    def evaluations(self) -> list[tuple[int, Path]]:
        """Files of answers to held-out examples, by version."""
        folders = [
            (step, folder) for folder in self.paths.evals.glob("step_*") if (step := step_of(folder)) is not None
        ]
        return [(step, file) for step, folder in sorted(folders) for file in sorted(folder.glob("*.jsonl"))]


def _is_rl(file: Path) -> bool:
    return "orchestrator" in read_table(file)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def read_answers(file: Path) -> Iterator[dict[str, Any]]:
    """Lines that are rollouts; a last one that is not whole is left out."""
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                answer = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(answer, dict) and isinstance(answer.get("reward"), int | float):
                yield answer
