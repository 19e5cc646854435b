"""The overview of the chosen runs: figures, waits, signs of a collapse, curves, differences."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import numpy as np
from nicegui import run as threads
from nicegui import ui

from trireme.config.files import without_secrets
from trireme.monitor.collapse import Warned
from trireme.monitor.progress import ends_of
from trireme.monitor.run_text import short_time
from trireme.tools.dashboard import theme
from trireme.tools.dashboard.charts import Canvas, Frame, line_chart, lines_of
from trireme.tools.dashboard.history import Metrics
from trireme.tools.dashboard.runs import RunFolder, RunSet, changed_s
from trireme.tools.diff.compare import compare_configurations

PACE_STEPS = 20  # number of newest steps whose median is the pace
TAIL_BYTES = 16 * 1024  # bytes read from the end of each run's metrics for the list
MOST_WARNINGS = 3  # number of persisting warnings shown
MOST_EARLIER_WARNINGS = 100
MOST_HELD_OUT = 3


async def build(runs: RunSet) -> None:
    page = Overview(runs)
    await page.renew()
    runs.watchers.append(page.renew)


class Overview:
    """The first of the chosen runs in full, and the others in its charts."""

    def __init__(self, runs: RunSet) -> None:
        self._runs = runs
        self._run = runs.main
        self._figures = ui.element("div").classes("tr-figures")
        self._now = theme.column()
        self._warnings = theme.column()
        self._warned: list[tuple[Warned, bool]] = []  # the warnings that are shown, each with whether it persists
        self._charts: dict[str, Canvas] = {}
        self._chart_grid = ui.element("div").classes("tr-grid")
        self._compared = theme.column()
        self._others = theme.column()
        self._listed: list[str] = []

    async def renew(self) -> None:
        # figures and state change with every look; charts are updated in place
        for place in (self._figures, self._now, self._compared):
            place.clear()
        with self._figures:
            for figure in figures(self._run):
                theme.figure(*figure)
        with self._now, theme.card("Now"):
            for line in _state_lines(self._run):
                ui.label(line)
        self._show_warnings()
        self._show_charts()
        if len(self._runs.chosen) > 1:
            rows = differences(self._runs.chosen)
            with self._compared, theme.card("What differs", "of the configurations of the chosen runs"):
                if rows:
                    theme.table(rows, {name: name for name in rows[0]})
                else:
                    ui.label("Nothing but where and how they run.").classes("tr-soft")
        await self._show_others()

    def _show_warnings(self) -> None:
        """Show those that persist, and fold those that do not any more. Only what is new closes them again."""
        found = self._run.warnings()
        if found == self._warned:
            return
        self._warned = found
        lasting, earlier = ([warned for warned, lasts in found if lasts == which] for which in (True, False))
        self._warnings.clear()
        with self._warnings:
            for warned in lasting[:MOST_WARNINGS]:
                _show_warning(self._runs, warned, is_lasting=True)
            if earlier:
                with ui.expansion(f"Earlier warnings: {len(earlier)}").classes("tr-card"):
                    for warned in earlier[:MOST_EARLIER_WARNINGS]:
                        _show_warning(self._runs, warned, is_lasting=False)

    def _show_charts(self) -> None:
        # one chart for all held-out rewards, and for the loss of validation
        chosen = self._runs.chosen
        names = {"": "validation/loss"} | {env: name for run in chosen for env, name in run.metrics.held_out().items()}
        held_out = [
            line
            for env, name in sorted(names.items())
            for line in lines_of(chosen, name, Frame(), env if len(names) > 2 else "")
        ]
        rewards = lines_of(chosen, "reward/mean", Frame())
        # a chart gets its place when it first has a curve, and keeps it
        for title, lines in {
            "Reward of the batches": rewards,
            "Loss": [] if rewards else lines_of(chosen, "loss", Frame()),
            "Reward of held-out examples": held_out,
            "Tokens a second": lines_of(chosen, "perf/tokens_per_s", Frame()),
        }.items():
            if lines:
                if title not in self._charts:
                    with self._chart_grid, theme.card(title):
                        self._charts[title] = Canvas().classes("tr-chart")
                self._charts[title].draw(line_chart(lines, Frame()))

    async def _show_others(self) -> None:
        """List all runs, with the end of each one's metrics. It is read again only if runs have come or gone."""
        library = self._runs.library.runs()
        names = [run.name for run in library]
        if len(library) < 2 or names == self._listed:
            return
        self._listed = names
        # reading the end of every run takes a while, so it is done in a thread
        rows = await threads.io_bound(lambda: [list_row(run) for run in library])
        if rows is None or self._others.is_deleted:
            return
        self._others.clear()
        with self._others, theme.card("All runs", f"{len(library)}; click on one, or choose several above"):
            labels = {"name": "Run", "step": "Steps", "reward": "Newest reward", "changed": "Last written", "ago": ""}
            table = theme.table(rows, labels, sortable=labels.keys() - {"ago"})
            table.add_slot(
                "body-cell-name",
                '<q-td :props="props"><a href="#" @click.prevent="$parent.$emit(\'look\', props.row.name)">'
                "{{ props.row.name }}</a></q-td>",
            )
            table.on("look", lambda event: ui.navigate.to(f"/?{urlencode({'run': event.args})}"))


# figures


def figures(run: RunFolder) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and a note of the figures that are known yet, what matters most first."""
    metrics = run.metrics
    step_s = _recent(metrics, "time/step")
    of = f" of {run.max_steps}" if run.max_steps else ""
    left_s = step_s * (run.max_steps - run.metrics.num_done) if step_s and run.max_steps else 0.0
    eta = f", {short_time(left_s)} to go" if left_s > 0 and run.is_live else ""
    yield "Steps trained", f"{run.metrics.num_done}{of}", f"{run.state}{eta}"

    if ends := ends_of(metrics.finite("reward/mean")):
        yield "Reward", f"{ends.last:.3f}", f"from {ends.first:.3f}: means of {ends}"
    elif ends := ends_of(metrics.finite("loss")):  # in RL the loss is no measure of progress
        yield "Loss", f"{ends.last:.4g}", f"from {ends.first:.4g}: means of {ends}"
    for env, name in list(metrics.held_out().items())[:MOST_HELD_OUT]:
        steps, values = metrics.series(name)
        before = f", from {values[0]:.3f} at {steps[0]}" if len(values) > 1 else ""
        yield f"Held-out {env}", f"{values[-1]:.3f}", f"version {steps[-1]}{before}"
    if step_s:
        waits_s = _recent(metrics, "time/wait_for_batch")
        note = "" if waits_s is None else f"{waits_s / step_s:.0%} of it waiting for a batch"
        yield "Seconds a step", f"{step_s:.3g}", note
    if (speed := _recent(metrics, "perf/tokens_per_s")) is not None:
        yield "Tokens a second", f"{speed:,.0f}", "trained on, prompts included"
    if (lag := metrics.last("lag/mean")) is not None:
        most = metrics.last("lag/max")
        yield "Lag", f"{lag:.2f}", "versions" if most is None else f"versions; at most {most:.0f}"
    if (entropy := metrics.last("policy/entropy")) is not None:
        kl = metrics.last("mismatch_kl")
        yield "Entropy", f"{entropy:.3f}", "nats" if kl is None else f"mismatch KL {kl:.2g}"


def _recent(metrics: Metrics, name: str) -> float | None:
    values = metrics.finite(name)[-PACE_STEPS:]
    return float(np.median(values)) if values else None


def _state_lines(run: RunFolder) -> Iterator[str]:
    """Yield what the run waits for, by its orchestrator; if that does not answer, what is known of the run."""
    # the orchestrator's own words are the newest and the most precise
    if status := run.status:
        weights = f"weights of version {status.version}" if status.version >= 0 else "no weights yet"
        yield (
            f"The orchestrator is {status.state}: batch {status.batch}, {weights}, "
            f"{status.in_flight} rollouts in flight."
        )
        yield from [f"Waits: {wait.text}" for wait in status.waits] or ["No process has waited for long."]
        for engine in status.engines:
            yield f"Engine {engine}"
        return

    written = f"Last written {ago(changed_s(run.path))}."
    yield {
        "not there yet": f"{run.path} does not exist yet. The run is shown as soon as it does.",
        "starting": "Its processes are starting: the logs say how far they are.",
        "running": "Its launcher is running; the orchestrator does not answer at the moment.",
        "finished": f"All steps are trained. {written}",
        "stopped": f"No process is working on it. {written} Start it with `--resume` to continue.",
        "not started": f"It has not reported anything. {written}",
    }.get(run.state, written)


# comparison and list of runs


def differences(runs: Sequence[RunFolder]) -> list[dict[str, str]]:
    """Return the keys that matter to results and differ between the runs, each with its values by run."""
    # all runs are compared with the first one
    main, *others = (without_secrets(run.config) for run in runs)
    rows: dict[str, dict[str, str]] = {}
    for run, config in zip(runs[1:], others, strict=True):
        for found in compare_configurations(main, config):
            if not found.is_place:
                row = {"key": found.key} | {each.name: found.a for each in runs}
                rows.setdefault(found.key, row)[run.name] = found.b
    return list(rows.values())


def list_row(run: RunFolder) -> dict[str, Any]:
    """Return a run's row of the list of all runs. Only the end of its metrics is read."""
    # the newest line of the trainer, and the newest with a reward
    step = reward = None
    for row in reversed(run.last_rows(TAIL_BYTES)):
        if step is None and row.get("process") in ("trainer", "sft"):
            step = row["step"] + 1
        if reward is None and isinstance(value := row.get("reward/mean"), int | float):
            reward = round(float(value), 4)
    at = changed_s(run.path)
    changed = datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M") if at else ""
    return {"name": run.name, "step": step, "reward": reward, "changed": changed, "ago": ago(at)}


def ago(unix_s: float) -> str:
    """
    Example:
        ago(time.time() - 200)  # "3 min ago"
    """
    if not unix_s:
        return "never"
    seconds = max(0.0, time.time() - unix_s)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{math.floor(seconds / length)} {unit} ago"
    return "just now"


def _show_warning(runs: RunSet, warned: Warned, *, is_lasting: bool) -> None:
    """Show what was seen, what it usually means, and what to try."""
    sign, metric = warned.sign, warned.sign.watched[0]
    with theme.card().style(f"border-left: 4px solid var(--tr-{'bad' if is_lasting else 'line'})"):
        with theme.row():
            ui.icon("warning_amber" if is_lasting else "history").classes("tr-warn" if is_lasting else "tr-soft")
            theme.heading(sign.name.replace("_", " "))
            theme.soft(f"step {warned.step}{', and still' if is_lasting else ''}")
            ui.space()
            ui.link(f"look at {metric}", runs.link("/metrics", find=metric))
        ui.label(f"{warned.seen}.")
        ui.label(sign.meaning).classes("tr-soft")
        ui.label(f"What to try: {sign.advice}")
