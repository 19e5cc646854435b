"""Comparison of `metrics.jsonl` with the journal: one orchestrator line per batch, one trainer line per step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.config.run import RunConfig
from trireme.journal.records import BatchRecord
from trireme.monitor.lines import read_lines
from trireme.monitor.metrics import parse_row
from trireme.orchestrator.batch_metrics import batch_metrics
from trireme.tools.audit.report import Report
from trireme.tools.record_differences import some


class MetricsLines:
    """The lines of `metrics.jsonl` that the audit compares: the last one of each step counts."""

    def __init__(self, path: Path) -> None:
        lines = read_lines(path)[0]
        rows = [row for line in lines if (row := parse_row(line)) is not None]
        self.unreadable = sum(bool(line.strip()) for line in lines) - len(rows)
        self.trained = {row["step"] for row in rows if row["process"] == "trainer"}
        self.batches = {row["step"]: row for row in rows if row["process"] == "orchestrator" and "reward/mean" in row}


def compare_batch(
    record: BatchRecord,
    config: RunConfig,
    row: Mapping[str, Any] | None,
    report: Report,
    *,
    may_lack_line: bool,
    may_have_old_line: bool,
) -> None:
    """Compare the journal's metrics with its rollouts, then the line in the file with the journal.

    Args:
        config: by which the batch was filled.
        row: the batch's line in `metrics.jsonl`.
        may_lack_line: the run may have been killed before it was written.
        may_have_old_line: the line may be that of an abandoned batch of this number.
    """
    # lags need a sampled token; the audit of tokens reports rollouts without one
    step, found = record.step, record.metrics
    if any((sample.versions >= 0).any() for rollout in record.rollouts for sample in rollout.samples):
        due = batch_metrics(step, record.rollouts, record.dropped, config=config, outcomes=record.outcomes)
        due |= {f"data/{name}/epoch": cursor.epoch for name, cursor in record.state.cursors.items()}
        due["curriculum/stage"] = record.state.stage
        report.compare(
            "metrics",
            step,
            {name: (found[name], due[name]) for name in found if name in due},  # journals of older versions lack some
            by="by its rollouts",
            rtol=1e-6,
        )

    if row is None:
        if not may_lack_line:
            _add_missing_line(report, "orchestrator", f"batch {step}", step)
    elif not may_have_old_line:
        # to the last bit: JSON keeps floats exactly, and has null for what is not finite
        report.compare(
            "metrics",
            step,
            {name: (row.get(name), value if math.isfinite(value) else None) for name, value in found.items()},
            of="in metrics.jsonl ",
            by="by the journal",
        )


def compare_lines(
    lines: MetricsLines, *, trained: int, newest: int, num_batches: int, set_aside: set[int], report: Report
) -> None:
    """Check that each trained step has one trainer line, and that no line is about a missing batch or version.

    Args:
        trained: all steps below this one must have a line.
        newest: version. The trainer writes the line of a step when the version that it made is confirmed.
        set_aside: abandoned steps, whose lines stay in the file.
    """
    # the trainer writes a step's line before the next version, so older steps have theirs
    for step in sorted(set(range(trained)) - lines.trained):
        _add_missing_line(report, "trainer", f"step {step}", step)
    # a line of the trainer comes after the confirmation of the version that the step made
    early = sorted(step for step in lines.trained - set_aside if newest <= step < num_batches)
    if early:
        report.add(
            "metrics",
            early[0],
            f"metrics.jsonl has a line of the trainer for step {some(early)}, and version {newest} is the newest",
            expected=f"version {early[0] + 1} confirmed before that line is written",
            advice=f"Or the confirmation was lost: look for journal/version_{early[0] + 1:06d}.msgpack.",
        )
    # no process reports on a batch before it is in the journal
    for process, steps in (("trainer", lines.trained), ("orchestrator", lines.batches.keys())):
        beyond = sorted(step for step in steps - set_aside if step >= num_batches)
        if beyond:
            report.add(
                "metrics",
                beyond[0],
                f"metrics.jsonl has lines of the {process} for step {some(beyond)}; there are {num_batches} batches",
                expected="a batch in the journal before any process reports on it",
                advice=f"Or batches were lost: look for journal/batch_{beyond[0]:06d}.msgpack.",
            )


def _add_missing_line(report: Report, process: str, what: str, step: int) -> None:
    report.add(
        "metrics",
        step,
        f"{what} has no line of the {process} in metrics.jsonl",
        expected="one line for each, but for the two newest",
    )
