"""Comparison of `metrics.jsonl` with the journal: one orchestrator line per batch, one trainer line per step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trireme.journal.records import BatchRecord
from trireme.journal.targets import agent_runs
from trireme.monitor.lines import read_lines
from trireme.monitor.metrics import parse_row
from trireme.tools.audit.report import Findings, shown, some
from trireme.tools.audit.tokens import Columns


class MetricsLines:
    """The lines of `metrics.jsonl` that the audit compares: the last one of each step counts."""

    def __init__(self, path: Path) -> None:
        lines = read_lines(path)[0]
        rows = [row for line in lines if (row := parse_row(line)) is not None]
        self.unreadable = sum(bool(line.strip()) for line in lines) - len(rows)
        self.trained = {row["step"] for row in rows if row["process"] == "trainer"}
        self.batches = {row["step"]: row for row in rows if row["process"] == "orchestrator" and "reward/mean" in row}


def measure(record: BatchRecord, columns: Columns) -> dict[str, float]:
    """Recompute the metrics of a batch from its rollouts.

    Those that journals of older versions lack are left out where this journal lacks them.
    """
    rollouts, trained = record.rollouts, columns.tokens.loss_mask == 1
    rewards = np.array([rollout.reward for rollout in rollouts])
    lags = record.step - columns.tokens.versions[columns.tokens.versions >= 0]
    completions = columns.per_rollout(trained, len(rollouts))
    turns = [rollout.num_turns for rollout in rollouts if rollout.num_turns]
    unmasked = sum(rollout.masked is None for rollout in rollouts)
    per_group = _grouped((rollout.group, rollout.reward) for rollout in rollouts)
    per_environment = _grouped((rollout.env, rollout.reward) for rollout in rollouts)
    own = _grouped(
        (f"env/{rollout.env}/{name}", value) for rollout in rollouts for name, value in rollout.metrics.items()
    )
    newer: dict[str, float] = {
        "reward/min": rewards.min(),
        "reward/max": rewards.max(),
        "turns/mean": float(np.mean(turns)) if turns else math.nan,
        "rollouts/trained": unmasked,
        "filters/masked_frac": 1 - unmasked / len(rollouts),
        "curriculum/stage": record.state.stage,
    }
    for name, ended in _grouped((outcome.env, outcome) for outcome in record.outcomes).items():
        groups = [per_group.get(outcome.group) or [outcome.mean] for outcome in ended]
        newer[f"env/{name}/solve_none"] = float(np.mean([max(group) <= 0 for group in groups]))
        newer[f"env/{name}/solve_all"] = float(np.mean([min(group) >= 1 for group in groups]))
    for name, cursor in record.state.cursors.items():
        newer[f"data/{name}/epoch"] = cursor.epoch
    measured: dict[str, float] = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(np.std([run.reward for rollout in rollouts for run in agent_runs(rollout)])),
        "reward/group_std": float(np.mean([np.std(values) for values in per_group.values()])),
        "lag/mean": float(lags.mean()) if len(lags) else math.nan,
        "lag/max": int(lags.max()) if len(lags) else math.nan,
        "tokens/completion_mean": float(completions.mean()),
        "tokens/completion_max": int(completions.max()),
        "tokens/total": int(columns.lengths.sum()),
        "truncated_frac": float(np.mean([rollout.truncated for rollout in rollouts])),
        "rollouts/dropped": len(record.dropped),
    }
    if len(per_environment) > 1:
        measured |= {f"reward/{name}/mean": float(np.mean(values)) for name, values in per_environment.items()}
    reasons = Counter(dropped.reason.split(":")[0].replace(" ", "_") for dropped in record.dropped)
    measured |= {f"rollouts/dropped/{reason}": count for reason, count in reasons.items()}
    measured |= {name: float(np.mean(values)) for name, values in own.items()}
    return {name: value for name, value in newer.items() if name in record.metrics} | measured


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    values: dict[Any, list[Any]] = defaultdict(list)
    for key, value in pairs:
        values[key].append(value)
    return values


def compare_batch(
    record: BatchRecord,
    columns: Columns | None,
    row: Mapping[str, Any] | None,
    findings: Findings,
    *,
    may_lack_line: bool,
    may_have_old_line: bool,
) -> None:
    """Compare the journal's metrics with its rollouts, then the line in the file with the journal.

    Args:
        row: the batch's line in `metrics.jsonl`.
        may_lack_line: the run may have been killed before it was written.
        may_have_old_line: the line may be that of an abandoned batch of this number.
    """
    step, found, add = record.step, record.metrics, partial(findings.add, "metrics", record.step)
    measured = measure(record, columns) if columns is not None and record.rollouts else {}
    numbers = [found.get(name, math.inf) for name in measured]
    close = np.isclose(numbers, list(measured.values()), rtol=1e-6, atol=1e-9, equal_nan=True)
    wrong = next((name for name, is_close in zip(measured, close, strict=True) if not is_close), None)
    if wrong is not None:
        add(
            f"batch {step}: the journal says {wrong} = {shown(found.get(wrong))}",
            expected=f"{measured[wrong]:.9g}, by its rollouts",
            meaning="A rollout of the batch was changed, or the metric was. Look at the batch.",
        )
    if row is None:
        if not may_lack_line:
            _add_missing_line(findings, "orchestrator", f"batch {step}", step)
        return
    # to the last bit: JSON keeps floats exactly, and has null for what is not finite
    written = {name: value if math.isfinite(value) else None for name, value in found.items()}
    wrong = next((name for name, value in written.items() if row.get(name) != value), None)
    if wrong is not None and not may_have_old_line:
        add(
            f"batch {step}: metrics.jsonl says {wrong} = {shown(row.get(wrong))}",
            expected=f"{shown(found[wrong])}, by the journal",
            meaning="What was shown of the run is not what it did. Look at the orchestrator's last line of this step.",
        )


def compare_lines(
    lines: MetricsLines, *, trained: int, newest: int, num_batches: int, set_aside: set[int], findings: Findings
) -> None:
    """Check that each trained step has one trainer line, and that no line is about a missing batch or version.

    Args:
        trained: all steps below this one must have a line.
        newest: version. The trainer writes the line of a step when the version that it made is confirmed.
        set_aside: abandoned steps, whose lines stay in the file.
    """
    for step in sorted(set(range(trained)) - lines.trained):
        _add_missing_line(findings, "trainer", f"step {step}", step)
    early = sorted(step for step in lines.trained - set_aside if newest <= step < num_batches)
    if early:
        findings.add(
            "metrics",
            early[0],
            f"metrics.jsonl has a line of the trainer for step {some(early)}, and version {newest} is the newest",
            expected=f"version {early[0] + 1} confirmed before that line is written",
            meaning="A confirmation was lost, or the line is of another run. Look for "
            f"journal/version_{early[0] + 1:06d}.msgpack.",
        )
    for process, steps in (("trainer", lines.trained), ("orchestrator", lines.batches.keys())):
        beyond = sorted(step for step in steps - set_aside if step >= num_batches)
        if beyond:
            findings.add(
                "metrics",
                beyond[0],
                f"metrics.jsonl has lines of the {process} for step {some(beyond)}; there are {num_batches} batches",
                expected="a batch in the journal before any process reports on it",
                meaning="Batches that were trained on were lost from the journal, or belong to another run. Look for "
                f"journal/batch_{beyond[0]:06d}.msgpack.",
            )


def _add_missing_line(findings: Findings, process: str, what: str, step: int) -> None:
    findings.add(
        "metrics",
        step,
        f"{what} has no line of the {process} in metrics.jsonl",
        expected="one line for each, but for the two newest",
        meaning="A line was lost (a full disk, or the file was changed). The journal still has the batch itself.",
    )
