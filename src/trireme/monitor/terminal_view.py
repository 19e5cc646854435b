"""A run as a live picture in a terminal."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trireme.config.run import RunConfig
from trireme.monitor.in_words import bar, evaluation_text, short_number, short_time, sparkline, warning_text
from trireme.monitor.logs import startup_phase
from trireme.monitor.metrics import Row
from trireme.monitor.view import Clock, StatusPoller, View

TABLE_STEPS = 8
SPARKLINE_WIDTH = 60
MOST_WARNINGS = 3  # in the live picture; the log has all of them

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


class TerminalView(View):
    """Header, processes, engines, newest steps, rewards so far, evaluations."""

    def __init__(
        self, config: RunConfig, poller: StatusPoller, console: Console, *, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(config, poller, console, clock=clock)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def show(self, *, final: bool) -> None:
        for step in self.progress.take_completed(final=final):
            self.say_samples(step)
        self._live.update(self.render(), refresh=True)

    def close(self) -> None:
        try:
            self._live.stop()
        except OSError:
            self._give_up()

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._header(), self._processes()]
        if self.progress.num_done:
            parts += [self._steps(), self._rewards()]
        if self.progress.evaluations():
            parts.append(Text("  ".join(map(evaluation_text, self.progress.evaluations()[-6:]))))
        parts += [
            Text(warning_text(warned), style="yellow") for warned in self.progress.lasting_warnings[-MOST_WARNINGS:]
        ]
        return Group(*parts)

    def _header(self) -> Text:
        done, total = self.progress.num_done, self.config.max_steps
        eta_s = self.progress.eta_s()
        text = Text()
        text.append(self.config.name or self.config.paths.root.name, style="bold")
        text.append(f"  {self.config.paths.root}", style="dim")
        text.append(f"  step {done}/{total} {bar(done / total)}  {short_time(self.elapsed_s)}")
        text.append(f"  ETA {short_time(eta_s)}" if eta_s is not None else "")
        return text

    def _processes(self) -> Table:
        table = Table.grid(padding=(0, 2))
        starting = self.status is None or self.status.state == "starting"
        for process in self.processes:
            coming_up = starting and process.state == "running"
            state = startup_phase(process.log, process.log_start) if coming_up else process.story
            table.add_row(Text(process.name, style="cyan"), Text(state), Text(self._waits_text(process.name)))
        for engine in self.status.engines if self.status else ():
            version = "" if engine.version is None else f"version {engine.version}"
            table.add_row(Text("engine", style="cyan"), Text(engine.state), Text(f"{version}  {engine.url}".strip()))
        return table

    def _waits_text(self, process: str) -> str:
        if self.status is None:
            return ""
        waits = "; ".join(wait.text for wait in self.status.waits_of(process))
        in_flight = f"{self.status.in_flight} in flight" if process == "orchestrator" else ""
        return "  ".join(filter(None, (in_flight, waits)))

    def _steps(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for _, title, _ in STEP_COLUMNS:
            table.add_column(title, justify="right")
        for step in self.progress.recent(TABLE_STEPS):
            row = self.progress.merged(step) | {"done": step + 1, "seconds": self.progress.step_seconds(step)}
            table.add_row(*(_cell(row, name, form) for name, _, form in STEP_COLUMNS))
        return table

    def _rewards(self) -> Text:
        rewards = self.progress.series("reward/mean")
        if not rewards:
            return Text("")
        low, high = min(rewards), max(rewards)
        return Text(f"reward/mean {low:.3f} to {high:.3f}  {sparkline(rewards, SPARKLINE_WIDTH)}", style="green")


def _cell(row: Row, name: str, form: str) -> Text:
    value = row.get(name)
    if value is None:
        return Text("-")
    return Text(short_number(value) if form == "short" else f"{value:{form}}")
