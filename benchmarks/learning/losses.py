"""Each loss at each lag on engines of each precision: an atlas of what they learn, and where they collapse.

    uv run --group bench python -m benchmarks.learning.losses             # the whole atlas
    uv run --group bench python -m benchmarks.learning.losses --seeds 1 --tasks reverse-text --only ipo importance
    uv run --group bench python -m benchmarks.learning.losses --seeds 0   # the tables and figures of what is there

A cell is one run of one task with one loss, lag, precision and seed: 40 steps in seconds (`in_process.py` says what is
the run's own in it and what is simulated). Its figures are a line of docs/curves/losses.jsonl, keyed by its settings,
so that a call that is broken off goes on where it was, and one with more seeds adds to what is there. Tables go into
docs/losses.md, a figure for each task beside the cells.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from statistics import mean, stdev
from typing import Annotated, Any

import numpy as np

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come: the machine's cores are shared among trials
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

from benchmarks import ROOT
from benchmarks.learning import fields
from benchmarks.learning.curves import CURVES, pyplot, save
from benchmarks.learning.in_process import ENGINES, TASKS, Course, Trial, learn
from benchmarks.measuring import command, markdown_row
from trireme.base.errors import NotFinite

CELLS = CURVES / "losses.jsonl"
WINDOW = 5
"""Steps whose rewards are averaged: a cell has one number for each five steps."""
COLLAPSED = 0.2
"""A run that ends so far below the best it had been has collapsed."""
LAGS = (0, 1, 4, 16)
BASELINE = "importance"
"""What the other losses are compared with."""
PAGE, BEGIN, END = ROOT / "docs" / "losses.md", "<!-- cells -->", "<!-- /cells -->"
SETTINGS = ("task", "loss", "lag", "engine", "seed", "steps")

SMALL: tuple[str, ...] = ("--orchestrator.batch-size", "64", "--orchestrator.rollouts-per-example", "8")
SMALL = (*SMALL, "--trainer.optim.weight-decay", "0")
"""Half of the quickstart's batch: sooner over, and harder, so that losses differ."""
LOSS, ADVANTAGE = "--trainer.loss.type", "--orchestrator.advantage.type"
TWICE = ("--trainer.num-iterations", "2")
PLAIN = (
    *("importance", "ipo", "dppo_tv", "dppo_kl", "ppo", "grpo", "dr_grpo", "dapo", "gspo", "luspo", "gmpo", "sapo"),
    *("vespo", "clip_cov", "kl_cov", "cispo", "reinforce", "tis", "icepop", "decoupled"),
)
CENTERED = ("importance", "ipo", "reinforce")
RECIPES: dict[str, tuple[str, ...]] = {
    **{name: (LOSS, name) for name in PLAIN},
    **{f"{name}, centered": (LOSS, name, "--trainer.loss.score-centering") for name in CENTERED},
    "icepop, dual clip": (LOSS, "icepop", "--trainer.loss.dual-clip", "3"),
}
"""The rows of the atlas. All have the default advantage, so that they differ in their losses alone."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "importance, max-RL": (LOSS, BASELINE, ADVANTAGE, "max_rl"),
    "GRPO with its advantage": (LOSS, "grpo", ADVANTAGE, "group_mean_std"),
    "GRPO with its advantage, 2 iterations": (LOSS, "grpo", ADVANTAGE, "group_mean_std", *TWICE),
    "RLOO": (LOSS, "reinforce", ADVANTAGE, "leave_one_out"),
    "REINFORCE++": (LOSS, "reinforce", ADVANTAGE, "batch"),
    "REINFORCE, running mean": (LOSS, "reinforce", ADVANTAGE, "ema"),
    "decoupled, 2 iterations": (LOSS, "decoupled", *TWICE),
    "importance, KL to reference": (LOSS, BASELINE, "--trainer.loss.beta", "0.02"),
    "importance, entropy bonus": (LOSS, BASELINE, "--trainer.loss.entropy-bonus", "0.003"),
    "cross-entropy on good rollouts": (LOSS, "cross_entropy"),
}
DISTILLED = "teacher alone (distillation)"
"""No reward at all; the teacher is what `importance` makes of the base model in as many steps, with another seed."""
TEACHER = ("--orchestrator.teacher.base-url", "http://127.0.0.1/v1", "--orchestrator.teacher.reward-weight", "0")
FLAGS = RECIPES | VARIANTS | {DISTILLED: (LOSS, BASELINE, *TEACHER)}


@dataclass(frozen=True)
class Cell:
    """The figures of one run."""

    task: str
    loss: str
    lag: int
    engine: str
    seed: int
    steps: int
    rewards: tuple[float, ...]  # mean training reward of each `WINDOW` steps
    ess: float | None  # mean effective share of samples
    masked: float | None  # mean share of tokens without a gradient because of a mask or clip
    mismatch_kl: float | None  # mean KL of engine and trainer with the same weights; None if the lag is never 0

    @property
    def settings(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in SETTINGS)

    @property
    def end(self) -> float:
        return self.rewards[-1]

    @property
    def has_collapsed(self) -> bool:
        return max(self.rewards) - self.end > COLLAPSED


def main(
    seeds: int = 5,
    steps: int = 40,
    tasks: tuple[str, ...] = tuple(TASKS),
    lags: tuple[int, ...] = LAGS,
    engines: tuple[str, ...] = tuple(ENGINES),
    only: Annotated[tuple[str, ...] | None, "losses"] = None,
    workers: Annotated[int, "processes of one thread each"] = 2,
) -> None:
    # A call that is broken off has all losses at all lags with its first seeds.
    wanted = [
        (task, loss, lag, engine, seed, steps)
        for seed, task, engine, lag, loss in product(range(seeds), tasks, engines, lags, only or RECIPES)
        if loss in RECIPES
    ]
    if "reverse-text" in tasks:
        more = [name for name in FLAGS if name not in RECIPES and (only is None or name in only)]
        wanted += [("reverse-text", loss, 1, "float32", seed, steps) for seed in range(seeds) for loss in more]

    known = {cell.settings for cell in read_cells()}
    run([trial_of(*settings) for settings in dict.fromkeys(wanted) if settings not in known], workers)
    report([cell for cell in read_cells() if cell.steps == steps])


def read_cells() -> list[Cell]:
    rows = map(json.loads, CELLS.read_text().splitlines()) if CELLS.exists() else ()
    cells = [Cell(**row | {"rewards": tuple(row["rewards"])}) for row in rows]
    return [*{cell.settings: cell for cell in cells}.values()]


def trial_of(task: str, loss: str, lag: int, engine: str, seed: int, steps: int) -> Trial:
    flags, its = (*SMALL, *FLAGS[loss]), (*SMALL, *FLAGS[BASELINE])
    teacher = Trial("teacher", its, seed=1000 + seed, max_steps=steps) if loss == DISTILLED else None
    return Trial(loss, flags, lag=lag, seed=seed, max_steps=steps, task=task, engine=engine, teacher=teacher)


def run(trials: list[Trial], workers: int) -> None:
    """Run all trials, a few at once, and write each cell as soon as it is known."""
    if any(trial.task == "fields" for trial in trials):
        fields.write_start()  # before processes would make it at the same time
    began = time.perf_counter()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(cell_of, trial): trial for trial in trials}
        for number, future in enumerate(as_completed(futures), start=1):
            cell = future.result()
            with CELLS.open("a") as file:
                file.write(json.dumps(vars(cell), separators=(",", ":")) + "\n")
            seconds = time.perf_counter() - began
            print(f"{number}/{len(trials)} {seconds:.0f} s  {cell.settings} {cell.end}", flush=True)


def cell_of(trial: Trial) -> Cell:
    """Run one trial. One whose weights or gradients are no longer finite has a reward of 0 from there on."""
    course = Course(trial)
    try:
        learn(trial, course=course)
    except NotFinite:
        course.rewards += [0.0] * (trial.max_steps - len(course.rewards))
    blocks = np.array(course.rewards[: trial.max_steps]).reshape(-1, WINDOW).mean(1)
    return Cell(
        trial.task,
        trial.name,
        trial.lag,
        trial.engine,
        trial.seed,
        trial.max_steps,
        rewards=tuple(round(float(reward), 3) for reward in blocks),
        ess=_mean(course.ess),
        masked=_mean(course.masked),
        mismatch_kl=_mean(course.mismatches) if trial.lag == 0 else None,
    )


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return float(f"{mean(known):.3g}") if known else None


def report(cells: list[Cell]) -> None:
    """Write the tables of all that is known into the page, and draw the figures."""
    sections = []
    for task in TASKS:
        atlas = [cell for cell in cells if cell.task == task and cell.loss in RECIPES]
        if atlas:
            full = len(RECIPES) * len(LAGS) * len(ENGINES) * 5
            better = f"better than `{BASELINE}` by, lags 0 to 4"
            header = ["loss", *(f"lag {lag}" for lag in LAGS), "± of seeds", better, "collapsed", "masked, lag 4"]
            sections.append(f"### {task} ({len(atlas)} of {full:,} cells)\n\n{table(header, rows_of(atlas))}")
            sections.append(f"![{task}](curves/losses-{task}.svg)")
            draw(task, atlas)

    places = [(task, lag) for task in TASKS for lag in (1, 4)]
    header = ["loss", *(f"{task}, lag {lag}" for task, lag in places)]
    sections.append(f"### Better than `{BASELINE}` by\n\n{table(header, comparisons_of(cells, places))}")
    header = ["engine", "median over losses and seeds", "range"]
    sections.append(f"### `mismatch_kl` of reverse-text at lag 0\n\n{table(header, mismatches_of(cells))}")
    header = ["recipe", "reward at the end", "seeds", "collapsed", "effective samples"]
    others = [cell for cell in cells if cell.loss not in RECIPES or cell.settings[:4] == PLACE_OF_VARIANTS]
    sections.append(f"### Variants: reverse-text, lag 1, float32\n\n{table(header, variants_of(others))}")

    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n\n".join([before + BEGIN, *sections, END + rest.partition(END)[2]]))
    print(f"{len(cells)} cells: {PAGE}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(map(markdown_row, [columns, ["---"] * len(columns), *rows]))


PLACE_OF_VARIANTS = ("reverse-text", BASELINE, 1, "float32")


def rows_of(atlas: list[Cell]) -> Iterator[list[str]]:
    """Yield a row for each loss. Rewards are those of float32 / bfloat16 / fp8."""
    for loss in RECIPES:
        own = [cell for cell in atlas if cell.loss == loss]
        if not own:
            continue
        groups = {key: [cell for cell in own if (cell.lag, cell.engine) == key] for key in product(LAGS, ENGINES)}
        ends = {key: [cell.end for cell in group] for key, group in groups.items()}
        rewards = [
            " / ".join(f"{mean(ends[lag, engine]):.2f}" if ends[lag, engine] else "-" for engine in ENGINES)
            for lag in LAGS
        ]
        spreads = [stdev(each) for each in ends.values() if len(each) > 1]
        masked = [cell.masked for cell in own if cell.lag == 4 and cell.masked is not None]
        yield [
            f"`{loss}`" if loss in PLAIN else loss,
            *rewards,
            f"{mean(spreads):.3f}" if spreads else "-",
            better_by(own, atlas),
            f"{sum(cell.has_collapsed for cell in own)}/{len(own)}",
            f"{100 * mean(masked):.1f} %" if masked else "-",
        ]


def better_by(own: list[Cell], atlas: list[Cell], lags: Sequence[int] = (0, 1, 4)) -> str:
    """Return by how much a loss ends above the baseline in the same place with the same seed, with standard error."""
    baseline = {cell.settings[2:]: cell.end for cell in atlas if cell.loss == BASELINE}
    pairs = [(cell, baseline.get(cell.settings[2:])) for cell in own if cell.lag in lags and cell.loss != BASELINE]
    found = [cell.end - end for cell, end in pairs if end is not None]
    if len(found) < 2:
        return "-"
    return f"{mean(found):+.3f} ± {stdev(found) / math.sqrt(len(found)):.3f} (n = {len(found)})"


def comparisons_of(cells: list[Cell], places: list[tuple[str, int]]) -> Iterator[list[str]]:
    """Yield a row for each loss that has been compared at several places."""
    for loss in RECIPES:
        by_task = {task: [cell for cell in cells if cell.task == task] for task in TASKS}
        own = {task: [cell for cell in of_task if cell.loss == loss] for task, of_task in by_task.items()}
        row = [better_by(own[task], by_task[task], [lag]) for task, lag in places]
        if sum(text != "-" for text in row) > len(row) // 2:
            yield [f"`{loss}`", *row]


def mismatches_of(cells: list[Cell]) -> Iterator[list[str]]:
    for engine in ENGINES:
        own = [cell for cell in cells if (cell.task, cell.engine) == ("reverse-text", engine)]
        found = [cell.mismatch_kl for cell in own if cell.loss in RECIPES and cell.mismatch_kl is not None]
        if found:
            yield [engine, f"{np.median(found):.1e}", f"{min(found):.1e} to {max(found):.1e}"]


def variants_of(cells: list[Cell]) -> Iterator[list[str]]:
    for loss in (BASELINE, *(name for name in FLAGS if name not in RECIPES)):
        own = [cell for cell in cells if cell.loss == loss]
        if own:
            ends = [cell.end for cell in own]
            shares = [cell.ess for cell in own if cell.ess is not None]
            end = f"{mean(ends):.3f}" + (f" ± {stdev(ends):.3f}" if len(ends) > 1 else "")
            yield [loss, end, str(len(own)), str(sum(cell.has_collapsed for cell in own)), f"{mean(shares):.2f}"]


def draw(task: str, atlas: list[Cell]) -> None:
    """Draw the reward at the end of each loss, at each lag and precision, with the collapses written in."""
    losses = [loss for loss in RECIPES if any(cell.loss == loss for cell in atlas)]
    places = list(product(LAGS, ENGINES))
    rewards = np.full((len(losses), len(places)), np.nan)
    figure, panel = pyplot.subplots(figsize=(8, 0.32 * len(losses) + 1.4), layout="constrained")
    for (row, loss), (column, place) in product(enumerate(losses), enumerate(places)):
        group = [cell for cell in atlas if cell.loss == loss and (cell.lag, cell.engine) == place]
        if group:
            rewards[row, column] = mean(cell.end for cell in group)
            collapsed = sum(cell.has_collapsed for cell in group)
            text = f"{rewards[row, column]:.2f}" + (f" ({collapsed})" if collapsed else "")
            panel.text(column, row, text, ha="center", va="center", fontsize=6.5)

    image = panel.imshow(rewards, aspect="auto", cmap="RdYlGn", vmin=np.nanmin(rewards), vmax=np.nanmax(rewards))
    panel.set_xticks(range(len(places)), [f"{engine}\nlag {lag}" for lag, engine in places], fontsize=6)
    panel.set_yticks(range(len(losses)), losses, fontsize=7)
    seeds = len({cell.seed for cell in atlas})
    panel.set_title(f"{task}: reward at the end, mean of up to {seeds} seeds (collapsed runs)", fontsize=8)
    figure.colorbar(image, shrink=0.6)
    save(figure, CURVES / f"losses-{task}.svg")


if __name__ == "__main__":
    command(main)
