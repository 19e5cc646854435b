"""What ten times as many rollouts, or ten times as many steps, cost: orchestrator, journal, and every reader of a run.

    uv run python -m benchmarks.growth [--steps 100] [--batch 64] [--folder FOLDER]

The real orchestrator writes three runs (`orchestrator/rollout_cost.py`): a small one, one with batches ten times as
large and ten times the rollouts under way, and one with ten times the steps. A number is what a whole run costs, in
processor milliseconds if its row names no other unit: the least of several rounds, in which the runs take turns. The
number in brackets compares its growth with that of the run: 1 is linear, 0.1 does not grow, above 1.1 is to be mended.
What a command takes for its `--help` is subtracted.
"""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from rich.console import Console

from benchmarks import ROOT
from benchmarks.measuring import command, cpu_s, print_table
from benchmarks.orchestrator.instant import REPORTED
from benchmarks.orchestrator.rollout_cost import measure_in
from trireme.config.files import write_run
from trireme.config.resolve import updated
from trireme.config.run import RunConfig
from trireme.journal.journal import Journal
from trireme.journal.rank_shares import Shares
from trireme.launch.resume import check_resume
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.status import StatusPoller
from trireme.monitor.view import View
from trireme.orchestrator.loop import restore_metrics
from trireme.orchestrator.watcher import Watcher
from trireme.tools.dashboard import overview, timeline, tokens
from trireme.tools.dashboard.charts import Frame, line_chart, lines_of
from trireme.tools.dashboard.rollout_index import RolloutIndex
from trireme.tools.dashboard.runs import RunFolder
from trireme.tools.replay_command import find_span
from trireme.tools.run_reader import RunReader
from trireme.tools.viewer.sources import MeanRewards, find_sources

Costs = Iterator[tuple[str, float]]  # what it is, and how much of it a whole run costs
TIMES, ROUNDS = 10, 2
CALL = """if True:
    import atexit, sys, time
    from trireme.cli.trireme import trireme
    kib = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
    atexit.register(lambda: print(time.process_time() * 1000, kib() / 1024, file=sys.stderr))
    sys.exit(trireme(sys.argv[1:]))
"""


def main(
    steps: int = 100,
    batch: Annotated[int, "rollouts"] = 64,
    folder: Annotated[Path | None, "keep the runs there, and take those that are there"] = None,
) -> None:
    sizes = {"small": (steps, batch), "rollouts": (steps, TIMES * batch), "steps": (TIMES * steps, batch)}
    least: dict[str, dict[str, float]] = {}
    gc.freeze()  # collections look at what is measured, and not at all that was imported
    with tempfile.TemporaryDirectory(prefix="growth-") as own:
        runs = {name: write_run_folder((folder or Path(own)) / name, *size) for name, size in sizes.items()}
        # the small run is both before and after the others: what else the machine does changes meanwhile
        for name in (*runs, "small") * ROUNDS:
            for what, cost in costs(runs[name]):
                known = least.setdefault(what, {})
                known[name] = min(cost, known.get(name, cost))
    columns = (f"{num_steps} steps of {size}" for num_steps, size in sizes.values())
    print_table(("", *columns), ((what, *map(partial(cell, cost), sizes)) for what, cost in least.items()))


def cell(cost: dict[str, float], name: str) -> str:
    growth = "" if name == "small" else f" ({cost[name] / max(1e-9, cost['small']) / TIMES:.2f})"
    return f"{cost[name]:,.1f}{growth}"


def write_run_folder(folder: Path, steps: int, batch: int) -> Path:
    """Write a run, with what its orchestrator took in `cost.json` beside it."""
    if not (folder / "cost.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        found = measure_in(folder, ROOT, steps * batch, 2 * batch, False)
        config = RunConfig.model_validate(json.loads((folder / "inside.json").read_text())["config"])
        write_run(config, config.paths.run_config)
        cost = {"orchestrator": found["orchestrator_us"] * steps * batch / 1e3, "its memory, MiB": found["grown_mib"]}
        (folder / "cost.json").write_text(json.dumps(cost))
    return folder / "run"


# what is measured, each as a user or a process does it


def costs(run: Path) -> Costs:
    config = updated(RunReader(run).read_config(), {"resume": True})
    yield from json.loads((run.parent / "cost.json").read_text()).items()
    for part in (journal, commands, resume, replay, dashboard, rollouts):
        yield from part(run, config)


def ms(what: str, work: Callable[[], object]) -> tuple[str, float]:
    return what, cpu_s(work) * 1e3


def journal(run: Path, config: RunConfig) -> Costs:
    files = config.paths.journal.glob("batch_*.msgpack")
    yield "journal: all batches, KiB", sum(file.stat().st_size for file in files) / 1024
    with tempfile.TemporaryDirectory(dir=run.parent) as copy:
        theirs, ours = Journal(config.paths.journal), Journal(Path(copy))
        appended = (ms("", partial(ours.append, theirs.read(step))) for step in theirs.steps())
        yield "journal: append all batches", sum(cost for _, cost in appended)


def commands(run: Path, config: RunConfig) -> Costs:
    for verb in ("audit", "status"):
        calls = ([sys.executable, "-c", CALL, verb, word] for word in ("--help", str(run)))
        ended = (subprocess.run(call, check=True, capture_output=True, text=True) for call in calls)
        own, cost = (list(map(float, each.stderr.split()[-2:])) for each in ended)
        yield f"trireme {verb}", cost[0] - own[0]
        yield f"trireme {verb}: memory, MiB", cost[1] - own[1]


def resume(run: Path, config: RunConfig) -> Costs:
    metrics, theirs = MetricsFile(config.paths.metrics, "orchestrator"), Journal(config.paths.journal)
    views: list[View] = []
    console, evaluator = Console(file=io.StringIO()), cast(Any, None)
    yield ms("resume: settings", lambda: check_resume(config))
    yield ms("resume: terminal", lambda: views.append(View(config, StatusPoller("", run), console)))
    yield ms("resume: state from the journal", theirs.head_state)
    yield ms("resume: metrics", lambda: restore_metrics(config, theirs, evaluator, metrics))
    yield ms("resume: warnings", lambda: Watcher(metrics))
    repeat_last_step(config)
    yield ms("terminal: a step later", lambda: views[0].tick((), final=True))


def repeat_last_step(config: RunConfig) -> None:
    MetricsFile(config.paths.metrics, "trainer").append(config.max_steps - 1, REPORTED)


def replay(run: Path, config: RunConfig) -> Costs:
    reader = RunReader(run)

    def read_all() -> None:
        rows, shares = reader.rows(), Shares(reader.journal, config)
        for step in find_span(config.paths, None, None):
            assert rows["trainer", step]
            reader.versions.read(step + 1)
            shares.of(step, rank=0, world=2)

    yield ms("trireme replay: all but the training", read_all)


def dashboard(run: Path, config: RunConfig) -> Costs:
    folder, frame = RunFolder(run, "run"), Frame()

    def draw() -> None:
        folder._refreshed_s = -1e9  # not limited to one look a second
        assert folder.refresh()
        list(overview.figures(folder))
        for name in folder.metrics.names():
            line_chart(lines_of([folder], name, frame), frame)

    def draw_timeline() -> None:
        folder.spans.refresh()
        timeline.timeline_chart(timeline.summarize(folder.spans, *folder.spans.extent()))

    yield ms("dashboard: all curves at first", draw)
    repeat_last_step(config)
    yield ms("dashboard: all curves, a step later", draw)
    yield ms("dashboard: timeline at first", draw_timeline)
    yield ms("dashboard: timeline again", draw_timeline)


def rollouts(run: Path, config: RunConfig) -> Costs:
    with tempfile.TemporaryDirectory() as cache:
        index = RolloutIndex(run, Path(cache))
        index.create()
        for what in ("at first", "nothing new"):
            yield ms(f"dashboard: index of rollouts, {what}", lambda: list(index.update()))
        for by in ("step", "reward"):
            yield ms(f"dashboard: list of rollouts by {by}", partial(index.search, "", sort=by, backwards=True))
        yield ms("dashboard: search for a word", lambda: index.search("say"))
    tokens._batch_file.cache_clear()
    yield ms("dashboard: one rollout", lambda: tokens.load_rollout(RunReader(run), config.max_steps // 2, 0))
    yield ms("eval-view: tree of batches", lambda: list(MeanRewards().update(find_sources([run]))))


if __name__ == "__main__":
    command(main)
