"""Show a run as a live picture in a terminal, and choose the view that fits the output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trireme.base.safe_text import clean
from trireme.config.run import RunConfig
from trireme.monitor.logs import startup_phase
from trireme.monitor.run_text import bar, evaluation_text, short_number, short_time, sparkline, warning_text
from trireme.monitor.view import StatusPoller, VfRlView, View

TABLE_STEPS = 8
SPARKLINE_WIDTH = 60
MOST_EVALUATIONS = 6
MOST_WARNINGS = 3  # the log has all of them

STEP_COLUMNS = (
    ("done", "step", "d"),
    ("reward/mean", "reward/mean", ".3f"),
    ("loss", "loss", ".4f"),
    ("grad_norm", "grad_norm", ".2f"),
    ("policy/entropy", "policy/entropy", ".3f"),
    ("importance_ratio", "ratio", ".2f"),
    ("mismatch_kl", "mismatch_kl", ".1e"),
    ("lag/mean", "lag/mean", ".1f"),
    ("perf/tokens_per_s", "tokens/s", "short"),
    ("seconds", "time", ".1f"),
)
"""Key, heading and format of each column."""


@contextmanager
def open_view(config: RunConfig, console: Console | None = None) -> Iterator[View]:
    """Open the view of a run: that of `vf-rl` if configured, a live picture in a terminal, else lines of text."""
    console = console or _Console()
    is_live = console.is_terminal and sys.stdout.isatty() and not console.is_dumb_terminal
    kind = VfRlView if config.console.style == "vf-rl" else LiveView if is_live else View
    server = config.orchestrator.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    with StatusPoller(f"http://{host}:{server.port or 8001}/status") as poller:
        view = kind(config, poller, console)
        try:
            yield view
        finally:
            view.close()


class _Console(Console):
    """A console that survives its reader (`rl | head`). rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class LiveView(View):
    """A picture of processes, engines, the newest steps, rewards, evaluations and warnings."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, *, final: bool) -> None:
        for step in self.progress.take_completed(final=final):
            self.say_samples(step)
        self._live.update(self._picture(), refresh=True)

    def close(self) -> None:
        try:
            self._live.stop()
        except OSError:
            self._give_up()

    def _picture(self) -> RenderableType:
        progress, total = self.progress, self.config.max_steps
        header = Text.assemble(
            (clean(self.config.name or self.config.paths.root.name), "bold"),
            (clean(f"  {self.config.paths.root}"), "dim"),
            f"  step {progress.num_done}/{total} {bar(progress.num_done / total)}  {short_time(self.elapsed_s)}",
        )
        eta_s = progress.eta_s()
        if eta_s is not None:
            header.append(f"  ETA {short_time(eta_s)}")
        parts: list[RenderableType] = [header, self._processes()]
        if progress.num_done:
            parts.append(self._steps())
        if rewards := progress.series("reward/mean"):
            line = f"reward/mean {min(rewards):.3f} to {max(rewards):.3f}  {sparkline(rewards, SPARKLINE_WIDTH)}"
            parts.append(Text(line, style="green"))
        if evaluations := progress.evaluations():
            parts.append(Text(clean("  ".join(map(evaluation_text, evaluations[-MOST_EVALUATIONS:])))))
        for warned in progress.lasting_warnings[-MOST_WARNINGS:]:
            parts.append(Text(clean(warning_text(warned)), style="yellow"))
        return Group(*parts)

    def _processes(self) -> Table:
        status = self.status
        rows = []
        for process in self.processes:
            is_coming_up = process.state == "running" and (status is None or status.state == "starting")
            waits = "; ".join(wait.text for wait in status.waits_of(process.name)) if status else ""
            if status and process.name == "orchestrator":
                waits = f"{status.in_flight} in flight  {waits}"
            state = startup_phase(process.log, process.log_start) if is_coming_up else process.story
            rows.append((process.name, state, waits))
        for engine in status.engines if status else ():
            version = "" if engine.version is None else f"version {engine.version}  "
            rows.append(("engine", engine.state, f"{version}{engine.url}"))
        table = Table.grid(padding=(0, 2))
        for name, state, what in rows:
            table.add_row(Text(clean(name), style="cyan"), Text(clean(state)), Text(clean(what)))
        return table

    def _steps(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for _, title, _ in STEP_COLUMNS:
            table.add_column(title, justify="right")
        for step in self.progress.recent(TABLE_STEPS):
            row = self.progress.merged(step) | {"done": step + 1, "seconds": self.progress.step_seconds(step)}
            cells = []
            for name, _, form in STEP_COLUMNS:
                value = row.get(name)
                text = "-" if value is None else short_number(value) if form == "short" else f"{value:{form}}"
                cells.append(Text(text))
            table.add_row(*cells)
        return table
