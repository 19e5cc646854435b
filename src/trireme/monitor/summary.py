"""The end of a run: what came of it, in a few lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from trireme.base.paths import step_folder, step_of
from trireme.config.run import RunConfig
from trireme.monitor.collapse import Warned
from trireme.monitor.in_words import short_time
from trireme.monitor.progress import Evaluation, Progress


def summary(progress: Progress, config: RunConfig, wall_s: float, restarts: Mapping[str, int] | None = None) -> str:
    """What came of the run, and where it lies."""
    paths = config.paths
    here = progress.num_session_steps
    session = f" ({here} in this session)" if here < progress.num_done else ""
    lines = [f"{progress.num_done} of {config.max_steps} steps{session} in {short_time(wall_s)}"]
    if ends := progress.reward_ends():
        lines.append(f"reward {ends.first:.3f} -> {ends.last:.3f} (mean of {ends})")
    lines += held_out_lines(progress.evaluations())
    lines += warning_lines(progress.warnings)
    lines += restarts_lines(restarts or {})
    lines += [f"weights      {_newest(paths.weights)}", f"checkpoints  {_newest(paths.checkpoints)}"]
    return "\n".join([*lines, f"logs         {paths.logs}"])


def restarts_lines(restarts: Mapping[str, int]) -> list[str]:
    """ "2 restarts: trainer 1, inference 1", where there were any."""
    total = sum(restarts.values())
    named = ", ".join(f"{name} {count}" for name, count in restarts.items() if count)
    return [f"{total} restart{'s' if total > 1 else ''}: {named}"] if total else []


def warning_lines(warnings: Sequence[Warned]) -> list[str]:
    """One line for each kind, about its last time: what was seen. Meaning and advice were given when it was."""
    newest = {warned.name: warned for warned in warnings}
    counts = Counter(warned.name for warned in warnings)
    often = {name: f" (the last of {count})" if count > 1 else "" for name, count in counts.items()}
    return [f"{_seen(warned)}{often[name]}" for name, warned in newest.items()]


def _seen(warned: Warned) -> str:
    return f"warning at step {warned.step + 1}, {warned.name}: {warned.text.partition('. ')[0]}"


def held_out_lines(evaluations: Sequence[Evaluation]) -> list[str]:
    """ "held-out reverse-text: 0.412 -> 0.893" for each environment, from its first evaluation to its last."""
    lines = []
    for env in sorted({evaluation.env for evaluation in evaluations}):
        of_env = [evaluation for evaluation in evaluations if evaluation.env == env]
        before, after = of_env[0], of_env[-1]
        numbers = f"{after.reward:.3f}" if len(of_env) == 1 else f"{before.reward:.3f} -> {after.reward:.3f}"
        versions = f"version {after.version}" if len(of_env) == 1 else f"versions {before.version} and {after.version}"
        lines.append(f"held-out {env}: {numbers} ({versions})")
    return lines


def _newest(parent: Path) -> str:
    step = newest_step(parent)
    return f"none in {parent}" if step is None else str(step_folder(parent, step))


def newest_step(parent: Path) -> int | None:
    """The highest N of the `step_N` folders in a folder."""
    steps = (step_of(folder) for folder in parent.iterdir()) if parent.is_dir() else ()
    return max((step for step in steps if step is not None), default=None)
