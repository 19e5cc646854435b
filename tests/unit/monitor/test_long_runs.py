"""A run of a million lines is shown with as much memory as one of some ten thousand, and still as it was (S20)."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from trireme.config.files import write_run
from trireme.config.run import RunConfig
from trireme.launch import restarts
from trireme.launch.restarts import Trained
from trireme.monitor import metrics, progress
from trireme.monitor.metrics import MetricsFile
from trireme.monitor.progress import Ends, Evaluation, Progress
from trireme.monitor.spans import Span
from trireme.monitor.status import StatusPoller
from trireme.monitor.timeline import shares
from trireme.monitor.view import View
from trireme.orchestrator.watcher import Watcher
from trireme.tools.cluster.status import look_at
from trireme.tools.dashboard import history
from trireme.tools.dashboard.charts import CURVE_POINTS, Frame, curve
from trireme.tools.dashboard.history import Metrics, Spans
from trireme.tools.dashboard.runs import RunFolder

LIMIT = 400


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times as long as the limits is long enough to see that nothing grows."""
    monkeypatch.setattr(history, "MOST_SPANS", 2 * LIMIT)
    monkeypatch.setattr(progress, "MOST_STEPS", LIMIT)
    monkeypatch.setattr(restarts, "LAST_BYTES", 4096)
    for module in (history, metrics):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)


def test_curve_of_a_long_run_has_few_points_with_its_spike() -> None:
    metrics = Metrics()
    for step in range(20 * LIMIT):
        loss = np.sin(step) + (100.0 if step == 37 else 0.0)
        metrics.add([{"step": step, "process": "trainer", "time_s": 10.0 * step, "loss": loss}])
    raw, smooth = curve(metrics, "loss", Frame("hours", smoothing=0.5))
    assert LIMIT / 2 < len(raw) <= CURVE_POINTS
    assert len(smooth) <= CURVE_POINTS
    assert max(raw, key=lambda point: point[1] or 0.0) == pytest.approx([37 / 360, np.sin(37) + 100.0], abs=1e-3)
    assert [raw[0][0], raw[-1][0]] == pytest.approx([0.0, (20 * LIMIT - 1) / 360], abs=1e-3)


def test_spans_are_bounded_and_the_shares_of_the_whole_run_stay_right(tmp_path: Path) -> None:
    written = []
    for step in range(10 * LIMIT):
        written += [Span("trainer", "train", 2.0 * step, 0.5, step), Span("trainer", "wait", 2 * step + 0.5, 1.5, step)]
        written.append(Span("engine e:1", "generate", 2.0 * step, 1.0 if step % 3 else 2.0, step))
    path = tmp_path / "spans.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in written))
    spans = Spans(path)
    assert spans.refresh()
    extent = spans.extent()
    assert extent == (0.0, 20.0 * LIMIT)
    kept = {lane: spans.within(*extent, lane) for lane in ("trainer", "engine e:1")}
    assert sum(map(len, kept.values())) <= 2 * LIMIT
    for lane, of_lane in kept.items():
        assert shares(of_lane, lane, *extent) == pytest.approx(shares(written, lane, *extent), abs=1e-4)


def test_long_run_progress_keeps_bounded_rows_but_all_evaluations() -> None:
    known = Progress(5 * LIMIT)
    known.begin_session()
    evaluated = range(0, 5 * LIMIT, 100)
    for step in range(5 * LIMIT):
        row = {"step": step, "process": "orchestrator", "reward/mean": float(step), "time_s": 2.0 * step}
        known.add([row, {"step": step, "process": "trainer", "loss": 0.5, "time_s": 2.0 * step}])
        if step in evaluated:
            known.add([{"step": step, "process": "orchestrator", "eval/a/reward": 1.0 * step, "eval/a-b/reward": None}])
        assert known.take_completed() == [step]
        assert known.merged(step)["loss"] == 0.5
        assert len(known.steps) <= LIMIT
    assert known.recent(2) == [5 * LIMIT - 2, 5 * LIMIT - 1]
    assert known.reward_ends() == Ends(first=2.0, last=5 * LIMIT - 3.0, steps=5)
    assert known.evaluations() == [Evaluation("a", version, float(version)) for version in evaluated]
    assert known.num_session_steps == 5 * LIMIT


def read_whole(run: RunFolder) -> None:
    while run.refresh():
        pass
    assert run.metrics.series("name/19").values.tolist() == [0.5]


READERS: dict[str, Callable[[RunConfig], object]] = {
    "dashboard": lambda config: read_whole(RunFolder(config.paths.root, "run")),
    "view": lambda config: View(config, StatusPoller("", config.paths.root), Console(quiet=True)).tick((), final=True),
    "status": lambda config: look_at(config.paths.root),
    "restarts": lambda config: Trained(config.paths.metrics).newest(),
    "warnings": lambda config: Watcher(MetricsFile(config.paths.metrics, "orchestrator")).look(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_long_file_of_metrics_is_read_in_pieces(reader: str, tmp_path: Path) -> None:
    config = RunConfig.model_validate({"output_dir": str(tmp_path)})
    write_run(config, config.paths.run_config)
    row = {"step": 1, "process": "trainer", "time_s": 1.0} | {f"name/{n}": 0.5 for n in range(20)}
    config.paths.metrics.write_text(json.dumps(row) + "\n")
    READERS[reader](config)  # imports take memory too
    config.paths.metrics.write_text((json.dumps(row) + "\n") * 2000)
    tracemalloc.start()
    READERS[reader](config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < config.paths.metrics.stat().st_size / 4
