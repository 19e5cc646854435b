"""Metrics and spans of a run, as its files grow, go back or are damaged."""

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from trireme.monitor.spans import Span
from trireme.monitor.timeline import shares
from trireme.tools.dashboard import history
from trireme.tools.dashboard.history import Metrics, Spans


def test_a_run_that_went_back_shows_nothing_of_the_way_that_it_left():
    metrics = Metrics()
    metrics.add({"step": step, "process": "trainer", "time_s": step, "loss": 1.0} for step in range(10))
    metrics.add([{"step": 7, "process": "orchestrator", "eval/e/reward": 0.9}])  # it comes late, and is no step back
    assert (metrics.went_back, len(metrics.series("loss").steps)) == ([], 10)
    assert metrics.series("eval/e/reward").steps.tolist() == [7]
    metrics.add({"step": step, "process": "trainer", "time_s": 20 + step, "loss": 2.0} for step in (4, 5))
    steps, values = metrics.series("loss")
    assert steps.tolist() == [0, 1, 2, 3, 4, 5]
    assert values.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    assert (metrics.went_back, metrics.num_done) == ([4], 6)


def test_rows_that_come_while_a_chart_is_drawn_are_all_kept(monkeypatch):
    """While numpy copies a column it holds it in place, and lets other threads run."""
    metrics, copied = Metrics(), np.array
    rows = [{"step": step, "process": "trainer", "time_s": step, "loss": 1.0 + step} for step in range(3)]
    metrics.add(rows[:1])
    writer = threading.Thread(target=metrics.add, args=(rows[1:],))

    def copy(column: Any, dtype: Any) -> Any:
        with memoryview(column):
            if writer.ident is None:
                writer.start()
            writer.join(0.1)  # a writer that does not wait for this reader ends here
        return copied(column, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(np, "array", copy)
        assert metrics.series("loss").values.tolist() == [1.0]
    writer.join()
    assert metrics.series("loss").values.tolist() == [1.0, 2.0, 3.0]


def test_spans_are_bounded_and_the_shares_of_the_whole_run_stay_right(tmp_path, monkeypatch):
    limit = 400
    monkeypatch.setattr(history, "MOST_SPANS", 2 * limit)
    monkeypatch.setattr(history, "PIECE_BYTES", 4096)
    written = []
    for step in range(10 * limit):
        written += [Span("trainer", "train", 2.0 * step, 0.5, step), Span("trainer", "wait", 2 * step + 0.5, 1.5, step)]
        written.append(Span("engine e:1", "generate", 2.0 * step, 1.0 if step % 3 else 2.0, step))
    path = tmp_path / "spans.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in written))
    spans = Spans(path)
    assert spans.refresh()
    extent = spans.extent()
    assert extent == (0.0, 20.0 * limit)
    kept = {lane: spans.within(*extent, lane) for lane in ("trainer", "engine e:1")}
    assert sum(map(len, kept.values())) <= 2 * limit
    for lane, of_lane in kept.items():
        assert shares(of_lane, lane, *extent) == pytest.approx(shares(written, lane, *extent), abs=1e-4)
