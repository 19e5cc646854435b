"""What can be said of runs at a glance: in figures, in differences of their configurations, in their newest line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trireme.monitor.ends import Ends, ends_of
from trireme.monitor.in_words import short_time
from trireme.tools.dashboard.columns import Columns
from trireme.tools.dashboard.runs import RunFolder

PACE = 20  # steps that say how fast it goes
TAIL_BYTES = 16 * 1024
SHARED = {"name", "output_dir", "resume", "ports", "hosts"}
"""Keys that say where a run is, not what it does."""


class Figure(NamedTuple):
    """A number in words, with what there is to say about it."""

    name: str
    value: str
    note: str = ""


def figures(run: RunFolder) -> list[Figure]:
    """Those that are known yet, what matters most first."""
    learned = [_progress(run), _reward(run), *_held_out(run), _loss(run)]
    return [figure for figure in (*learned, _pace(run), _speed(run), _lag(run), _entropy(run)) if figure is not None]


def _progress(run: RunFolder) -> Figure:
    of = f" of {run.max_steps}" if run.max_steps else ""
    left_s = eta_s(run)
    eta = f", {short_time(left_s)} to go" if left_s and run.is_live() else ""
    return Figure("Steps trained", f"{run.num_done}{of}", f"{run.state()}{eta}")


def eta_s(run: RunFolder) -> float | None:
    """At the pace of the newest steps."""
    step_s = _median_of_last(run.columns, "time/step", PACE)
    return None if step_s is None or not run.max_steps else max(0.0, step_s * (run.max_steps - run.num_done))


def _reward(run: RunFolder) -> Figure | None:
    if ends := _ends(run.columns, "reward/mean"):
        return Figure("Reward", f"{ends.last:.3f}", f"from {ends.first:.3f}: means of {ends}")
    return None


def _held_out(run: RunFolder) -> Iterator[Figure]:
    names = [name for name in run.columns.names() if name.startswith("eval/") and name.endswith("/reward")]
    for name in names[:3]:
        steps, values = run.columns.series(name)
        env = name.removeprefix("eval/").removesuffix("/reward")
        before = f", from {values[0]:.3f} at {steps[0]}" if len(values) > 1 else ""
        yield Figure(f"Held-out {env}", f"{values[-1]:.3f}", f"version {steps[-1]}{before}")


def _loss(run: RunFolder) -> Figure | None:
    """Of supervised training; in RL it says little."""
    if run.columns.last("reward/mean") is not None or not (ends := _ends(run.columns, "loss")):
        return None
    return Figure("Loss", f"{ends.last:.4g}", f"from {ends.first:.4g}: means of {ends}")


def _pace(run: RunFolder) -> Figure | None:
    step_s = _median_of_last(run.columns, "time/step", PACE)
    waits_s = _median_of_last(run.columns, "time/wait_for_batch", PACE)
    if step_s is None:
        return None
    note = f"{waits_s / step_s:.0%} of it waiting for a batch" if waits_s is not None and step_s > 0 else ""
    return Figure("Seconds a step", f"{step_s:.3g}", note)


def _speed(run: RunFolder) -> Figure | None:
    speed = _median_of_last(run.columns, "perf/tokens_per_s", PACE)
    return None if speed is None else Figure("Tokens a second", f"{speed:,.0f}", "trained on, prompts included")


def _lag(run: RunFolder) -> Figure | None:
    lag, most = run.columns.last("lag/mean"), run.columns.last("lag/max")
    note = f"versions; at most {most:.0f}" if most is not None else "versions"
    return None if lag is None else Figure("Lag", f"{lag:.2f}", note)


def _entropy(run: RunFolder) -> Figure | None:
    entropy = run.columns.last("policy/entropy")
    kl = run.columns.last("mismatch_kl")
    note = f"mismatch KL {kl:.2g}" if kl is not None else "nats"
    return None if entropy is None else Figure("Entropy", f"{entropy:.3f}", note)


def _ends(columns: Columns, name: str) -> Ends | None:
    values = columns.series(name).values
    return ends_of(values[np.isfinite(values)].tolist())


def _median_of_last(columns: Columns, name: str, count: int) -> float | None:
    values = columns.series(name).values[-count:]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


# comparing


def differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """Keys whose values are not the same in all of them, each with its values; "–" where a run has no such key."""
    flat = [dict(_leaves(run.config())) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [_said(one[key]) if key in one else "–" for one in flat]) for key in keys if _counts(key)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _counts(key: str) -> bool:
    return key.split(".")[0] not in SHARED and not key.endswith(".port")


def _leaves(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(below, f"{above}.{key}" if above else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{above}[{place}]")
    else:
        yield above, value


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# all runs


class Glance(NamedTuple):
    """One line of a list of runs; nothing of it is read but the end of a file."""

    name: str
    step: int | None
    reward: float | None
    changed_s: float  # unix; 0 where nothing was written


def glance(run: RunFolder) -> Glance:
    step: int | None = None
    reward: float | None = None
    for row in reversed(_last_rows(run.paths.metrics)):
        step = row["step"] + 1 if step is None and row.get("process") in ("trainer", "sft") else step
        value = row.get("reward/mean")
        reward = float(value) if reward is None and isinstance(value, int | float) else reward
    return Glance(run.name, step, reward, _changed_s(run.path))


def _last_rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # the first is cut; others may be damaged
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _changed_s(run: Path) -> float:
    times = []
    for name in ("metrics.jsonl", "configs", ""):
        try:
            times.append((run / name).stat().st_mtime)
        except OSError:
            continue
    return times[0] if times else 0.0


def ago(unix_s: float, now_s: float | None = None) -> str:
    """ "3 min ago"."""
    if not unix_s:
        return "never"
    seconds = max(0.0, (time.time() if now_s is None else now_s) - unix_s)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{math.floor(seconds / length)} {unit} ago"
    return "just now"
