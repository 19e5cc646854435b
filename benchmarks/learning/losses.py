"""Every loss on the quickstart task, and what staleness does to them: a table, and a plot beside it.

    uv run --group bench python -m benchmarks.learning.losses losses   # each recipe at a lag of 1 version
    uv run --group bench python -m benchmarks.learning.losses lag      # lags 0 to 16 with and without correction

`--seeds 5`, `--steps 40` and `--workers 2` (processes of one thread each) are the defaults; `--only GRPO DAPO` runs a
part again. Rewards go to docs/curves/learning-TABLE.json, the plot beside them, the table to the terminal.
See `in_process.py` for what is the run's own in this and what is not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: the machine's cores are shared among trials
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from benchmarks.learning.curves import CURVES, pyplot, save
from benchmarks.learning.in_process import Course, Trial, learn
from benchmarks.measuring import command, print_table

GOAL = 0.85
"""Mean training reward, over `WINDOW` steps, that counts as learned. The base model has 0.41."""
WINDOW = 5
COLLAPSED = 0.2
"""A run that ends so far below the best it had been has collapsed."""
LAGS = (0, 1, 2, 4, 8, 16)

LOSS, ADVANTAGE = "--trainer.loss.type", "--orchestrator.advantage.type"
TWICE = ("--trainer.num-iterations", "2")
SMALL = ("--orchestrator.batch-size", "64", "--orchestrator.rollouts-per-example", "8")
"""Half of the quickstart's batch: sooner over, and harder, so that losses differ."""
RECIPES: dict[str, tuple[str, ...]] = {
    "importance": (),
    "importance, max-RL": (ADVANTAGE, "max_rl"),
    "GRPO": (LOSS, "grpo", ADVANTAGE, "group_mean_std"),
    "GRPO, 2 iterations": (LOSS, "grpo", ADVANTAGE, "group_mean_std", *TWICE),
    "Dr. GRPO": (LOSS, "dr_grpo"),
    "DAPO": (LOSS, "dapo", ADVANTAGE, "group_mean_std", "--orchestrator.filters.truncated", "mask"),
    "GSPO": (LOSS, "gspo", ADVANTAGE, "group_mean_std"),
    "CISPO": (LOSS, "cispo", ADVANTAGE, "group_mean_std"),
    "RLOO": (LOSS, "reinforce", ADVANTAGE, "leave_one_out"),
    "REINFORCE++": (LOSS, "reinforce", ADVANTAGE, "batch"),
    "REINFORCE, running mean": (LOSS, "reinforce", ADVANTAGE, "ema"),
    "TIS": (LOSS, "tis"),
    "IcePop": (LOSS, "icepop"),
    "decoupled": (LOSS, "decoupled"),
    "decoupled, 2 iterations": (LOSS, "decoupled", *TWICE),
    "importance, KL to reference": ("--trainer.loss.beta", "0.02"),
    "importance, entropy bonus": ("--trainer.loss.entropy-bonus", "0.003"),
    "cross-entropy on good rollouts": (LOSS, "cross_entropy"),
}
DISTILLED = "teacher alone (distillation)"
"""No reward at all; the teacher is what `importance` makes of the base model in as many steps, with another seed."""
TEACHER = ("--orchestrator.teacher.base-url", "http://127.0.0.1/v1", "--orchestrator.teacher.reward-weight", "0")
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none (REINFORCE)": (LOSS, "reinforce"),
    "importance": (),
}


@dataclass(frozen=True)
class Summary:
    """The figures of one row, of all its seeds."""

    name: str
    rewards: np.ndarray  # [seeds, steps]
    ess: float  # mean over all steps and seeds

    @property
    def smooth(self) -> np.ndarray:
        kernel = np.ones(WINDOW) / WINDOW
        return np.stack([np.convolve(row, kernel, mode="valid") for row in self.rewards])

    @property
    def steps_to_goal(self) -> list[int | None]:
        reached = self.smooth >= GOAL
        return [int(row.argmax()) + WINDOW if row.any() else None for row in reached]

    @property
    def num_collapsed(self) -> int:
        smooth = self.smooth
        return int((smooth.max(1) - smooth[:, -1] > COLLAPSED).sum())

    def row(self) -> list[str]:
        reached = [steps for steps in self.steps_to_goal if steps is not None]
        steps = f"{np.median(reached):.0f} ({min(reached)}-{max(reached)})" if reached else "-"
        last = self.smooth[:, -1]
        end = f"{last.mean():.3f} ± {last.std():.3f}"
        counts = (f"{len(reached)}/{len(self.rewards)}", steps)
        return [self.name, *counts, end, f"{self.num_collapsed}", f"{self.ess:.2f}"]


COLUMNS = ["", f"seeds that reach {GOAL}", "steps to it: median (range)", "reward at the end", "collapsed"]
COLUMNS += ["effective samples"]


def main(
    table: Literal["losses", "lag"],
    seeds: int = 5,
    steps: int = 40,
    workers: Annotated[int, "processes of one thread each"] = 2,
    only: tuple[str, ...] | None = None,
) -> None:
    everything = losses() if table == "losses" else lags()
    trials = {
        name: [trial_of(name, flags, lag=lag, seed=seed, steps=steps) for seed in range(seeds)]
        for name, (flags, lag) in everything.items()
        if only is None or name in only
    }
    courses = run([trial for group in trials.values() for trial in group], workers)

    # Rows that were made before stay, so that a part can be made again.
    path = CURVES / f"learning-{table}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {name: keep([courses[trial] for trial in group]) for name, group in trials.items()}
    found = {name: found[name] for name in everything if name in found}
    lines = (f" {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in found.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    summaries = [Summary(name, np.array(row["rewards"]), row["ess"]) for name, row in found.items()]
    print_table(COLUMNS, (summary.row() for summary in summaries))
    plot(path.with_suffix(".svg"), panels_of(summaries, table))


def run(trials: list[Trial], workers: int) -> dict[Trial, Course]:
    """Run all trials, a few at once."""
    results = {}
    began = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(learn, trial): trial for trial in trials}
        for number, future in enumerate(as_completed(futures), start=1):
            trial = futures[future]
            results[trial] = future.result()
            seconds = time.perf_counter() - began
            print(
                f"{number}/{len(trials)} {seconds:.0f} s  {trial.name}, lag {trial.lag}, seed {trial.seed}", flush=True
            )
    return results


def keep(courses: list) -> dict:
    """Return one row as it is written."""
    return {
        "rewards": np.round([course.rewards for course in courses], 4).tolist(),
        "ess": round(float(np.nanmean([course.ess for course in courses])), 4),
    }


def trial_of(name: str, flags: tuple[str, ...], *, lag: int, seed: int, steps: int) -> Trial:
    teacher = Trial("teacher", SMALL, seed=1000 + seed, max_steps=steps) if name == DISTILLED else None
    return Trial(name, SMALL + flags, lag=lag, seed=seed, max_steps=steps, teacher=teacher)


def losses() -> dict[str, tuple[tuple[str, ...], int]]:
    return {name: (flags, 1) for name, flags in (RECIPES | {DISTILLED: TEACHER}).items()}


def lags() -> dict[str, tuple[tuple[str, ...], int]]:
    return {f"lag {lag}, {name}": (flags, lag) for lag in LAGS for name, flags in CORRECTIONS.items()}


def panels_of(summaries: list[Summary], table: str) -> dict[str, dict[str, Summary]]:
    """Return the curves of each panel: of each recipe alone, or of each lag with and without correction."""
    if table == "losses":
        return {summary.name: {"": summary} for summary in summaries}
    by_name = {summary.name: summary for summary in summaries}
    keys = {lag: {name: f"lag {lag}, {name}" for name in CORRECTIONS} for lag in LAGS}
    return {
        f"lag {lag}": {name: by_name[key] for name, key in names.items() if key in by_name}
        for lag, names in keys.items()
    }


def plot(path: Path, panels: dict[str, dict[str, Summary]]) -> None:
    columns = 4 if len(panels) > len(LAGS) else 3
    rows = -(-len(panels) // columns)
    shared: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = pyplot.subplots(rows, columns, figsize=(11, max(6, 2 * rows)), **shared)
    for panel, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        panel.axhline(GOAL, color="0.7", linewidth=0.6)
        panel.set_title(title, fontsize=8)
        for number, (label, summary) in enumerate(lines.items()):
            smooth, color = summary.smooth, f"C{number}"
            steps = np.arange(smooth.shape[1]) + WINDOW
            panel.plot(steps, smooth.mean(0), color=color, label=label or None, linewidth=1.2)
            panel.fill_between(steps, smooth.min(0), smooth.max(0), color=color, alpha=0.2, linewidth=0)
    for panel in list(axes.flat)[len(panels) :]:
        panel.set_visible(False)
    if axes.flat[0].get_legend_handles_labels()[1]:
        axes.flat[0].legend(fontsize=7, frameon=False)
    figure.supxlabel("step")
    figure.supylabel("training reward, mean and range over seeds")
    save(figure, path)


if __name__ == "__main__":
    command(main)
