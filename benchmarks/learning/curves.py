"""The learning curve of a run, from its metrics: what docs/curves shows of the shipped configurations.

    uv run --group bench python -m benchmarks.learning.curves outputs/wordle [outputs/alphabet-sort …]

Writes docs/curves/NAME.csv (step, training reward, held-out reward if it was evaluated) and docs/curves/NAME.svg.
Without folders it draws the .csv files that are there again.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks import ROOT
from benchmarks.measuring import command
from support.runs.real_run import Run

matplotlib.rcParams["svg.hashsalt"] = "trireme"  # the same figures give the same file
CURVES = ROOT / "docs" / "curves"
COLUMNS = ("step", "reward", "held_out")
WINDOW = 5


def main(*folders: str) -> None:
    for folder in map(Path, folders):
        if not (rows := read_rows(Run(folder))):
            sys.exit(f"{folder}: no step is in its metrics.jsonl - expected the folder of a run. Check the path.")
        with (CURVES / f"{folder.name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    for path in sorted(CURVES.glob("*.csv")):
        draw(path)
        print(path.with_suffix(".svg"))


def read_rows(run: Run) -> list[dict[str, float]]:
    """Return a row for each step or evaluated version; what is not known is left out."""
    rows: dict[int, dict[str, float]] = {}
    rewards = {row["step"]: row["reward/mean"] for row in run.rows("orchestrator")}
    for name, values in (("reward", rewards), ("held_out", run.evaluations())):
        for step, value in values.items():
            rows.setdefault(step, {"step": step})[name] = round(value, 4)
    return [rows[step] for step in sorted(rows)]


def draw(path: Path) -> None:
    with path.open() as file:
        rows = list(csv.DictReader(file))
    steps, rewards = _points(rows, "reward")
    figure, panel = pyplot.subplots(figsize=(6, 3))
    panel.plot(steps, rewards, color="C0", alpha=0.3, linewidth=0.8)
    panel.plot(
        steps[WINDOW - 1 :], np.convolve(rewards, np.ones(WINDOW) / WINDOW, "valid"), color="C0", label="training"
    )
    panel.plot(*_points(rows, "held_out"), "o-", color="C1", markersize=4, label="held out")
    panel.set(xlabel="step", ylabel="reward", title=path.stem)
    panel.legend(frameon=False)
    save(figure, path.with_suffix(".svg"))


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def _points(rows: list[dict[str, str]], column: str) -> tuple[list[int], list[float]]:
    known = [row for row in rows if row[column]]
    return [int(row["step"]) for row in known], [float(row[column]) for row in known]


if __name__ == "__main__":
    command(main)
