"""The learning curve of a run, from its metrics: what docs/curves shows of the shipped configurations.

    uv run --group bench python benchmarks/curves.py outputs/wordle [outputs/alphabet-sort …]

Writes docs/curves/NAME.csv (step, training reward, held-out reward where it was evaluated) and docs/curves/NAME.svg.
Without folders it draws the .csv files that are there again.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "trireme"  # the same figures give the same file
from matplotlib import pyplot  # noqa: E402 - after its backend is chosen

from trireme.monitor.metrics import latest_by_step, read_metrics  # noqa: E402

CURVES = Path(__file__).parents[1] / "docs" / "curves"
COLUMNS = ("step", "reward", "held_out")
WINDOW = 5


def read_run(folder: Path) -> list[dict[str, float | str]]:
    """One row per step or evaluated version; what is not known stays empty."""
    rows: dict[int, dict[str, float | str]] = {}
    found, _ = read_metrics(folder / "metrics.jsonl")
    for (process, step), row in latest_by_step(found).items():
        if process != "orchestrator":
            continue
        held_out = [value for name, value in row.items() if name.startswith("eval/") and name.endswith("/reward")]
        entry = rows.setdefault(step, {"step": step, "reward": "", "held_out": ""})
        if "reward/mean" in row:
            entry["reward"] = round(row["reward/mean"], 4)
        if held_out:
            entry["held_out"] = round(sum(held_out) / len(held_out), 4)
    return [rows[step] for step in sorted(rows)]


def write_csv(path: Path, rows: list[dict[str, float | str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def _points(rows: list[dict[str, str]], column: str) -> tuple[list[int], list[float]]:
    known = [row for row in rows if row[column]]
    return [int(row["step"]) for row in known], [float(row[column]) for row in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    for folder in parser.parse_args().runs:
        if not (rows := read_run(folder)):
            parser.error(f"{folder}: no step is in its metrics.jsonl - expected the folder of a run. Check the path.")
        write_csv(CURVES / f"{folder.name}.csv", rows)
    for path in sorted(CURVES.glob("*.csv")):
        draw(path)
        print(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
