"""Numbers, steps, evaluations and warnings as a line of text says them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from trireme.monitor.collapse import Warned
from trireme.monitor.progress import Evaluation, Progress, Status

LONG_WAIT_S = 5.0  # shorter ones are part of every step


def step_line(progress: Progress, step: int, status: Status | None) -> str:
    """One completed step in one line; numbers that nobody reported are left out."""
    row = progress.merged(step)
    width = len(str(progress.max_steps))
    parts = [f"step {step + 1:>{width + 2}}/{progress.max_steps}"]
    for label, name, form in (
        ("reward", "reward/mean", ".3f"),
        ("loss", "loss", ".4f"),
        ("grad", "grad_norm", ".2f"),
        ("entropy", "policy/entropy", ".2f"),
        ("ratio", "importance_ratio", ".2f"),
        ("lag", "lag/mean", ".1f"),
    ):
        if row.get(name) is not None:
            parts.append(f"{label} {row[name]:{form}}")
    if row.get("perf/tokens_per_s") is not None:
        parts.append(f"{short_number(row['perf/tokens_per_s'])} tok/s")
    wait = status.root_wait() if status else None
    if wait is not None and wait.waited_s >= LONG_WAIT_S:
        parts.append(f"waits: {wait.text}")
    eta_s = progress.eta_s()
    return "  ".join(parts) + (f"  ETA {short_time(eta_s)}" if eta_s is not None else "")


def evaluation_text(evaluation: Evaluation) -> str:
    return f"eval {evaluation.env} {evaluation.reward:.3f} at version {evaluation.version}"


def warning_text(warned: Warned) -> str:
    return f"warning at step {warned.step + 1}, {warned.name}: {warned.text}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Means of equal shares of the values, from lowest to highest."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * (mean - low) / span))] for mean in means)


def bar(share: float, width: int = 20) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def short_number(value: float) -> str:
    """12345 -> "12.3k"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """92 -> "1:32", 3723 -> "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
