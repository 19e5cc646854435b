"""Numbers, steps, samples, evaluations, warnings and the end of a run as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.base.errors import JournalCorrupt
from trireme.base.paths import step_folder, steps_in
from trireme.base.safe_text import shortened
from trireme.config.run import RunConfig
from trireme.journal.message_text import as_text, content_text
from trireme.monitor.collapse import Warned
from trireme.monitor.progress import Evaluation, Progress
from trireme.monitor.status import Status

if TYPE_CHECKING:
    from trireme.journal.records import BatchRecord, Rollout

LONG_WAIT_S = 5.0  # shorter waits are part of every step
MOST_CHARACTERS = 2000  # limit for a sample's prompt, and for its completion

Message = dict[str, Any]


def step_line(progress: Progress, step: int, status: Status | None) -> str:
    """Return a completed step as a line, without the numbers that no process reported."""
    row = progress.merged(step)
    width = len(str(progress.max_steps))

    # Which metrics there are depends on the loss and on the process that reported so far.
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

    # A long wait explains a slow step; short ones belong to every step.
    wait = status.root_wait() if status else None
    if wait is not None and wait.waited_s >= LONG_WAIT_S:
        parts.append(f"waits: {wait.text}")

    eta_s = progress.eta_s()
    return "  ".join(parts) + (f"  ETA {short_time(eta_s)}" if eta_s is not None else "")


def evaluation_text(evaluation: Evaluation) -> str:
    return f"eval {evaluation.env} {evaluation.reward:.3f} at version {evaluation.version}"


def warning_text(warned: Warned) -> str:
    return f"warning at step {warned.step + 1}, {warned.name}: {warned.text}"


def bar(share: float, width: int = 20) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "█" * full + "░" * (width - full)


def short_number(value: float) -> str:
    """Format a number: 12345 -> "12.3k"."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """Format a duration: 92 -> "1:32", 3723 -> "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# the end of a run


def summary(progress: Progress, config: RunConfig, wall_s: float, restarts: Mapping[str, int] | None = None) -> str:
    """Return the result of a run and the paths of its files, in a few lines."""
    paths = config.paths
    here = progress.num_session_steps
    session = f" ({here} in this session)" if here < progress.num_done else ""
    lines = [f"{progress.num_done} of {config.max_steps} steps{session} in {short_time(wall_s)}"]

    # Rewards and evaluations are those of the whole run, including earlier sessions.
    if ends := progress.reward_ends():
        lines.append(f"reward {ends.first:.3f} -> {ends.last:.3f} (mean of {ends})")
    lines += held_out_lines(progress.evaluations())
    lines += warning_lines(progress.warnings)
    lines += restarts_lines(restarts or {})

    for name, folder in (("weights", paths.weights), ("checkpoints", paths.checkpoints)):
        steps = steps_in(folder)
        lines.append(f"{name:13}" + (str(step_folder(folder, steps[-1])) if steps else f"none in {folder}"))
    return "\n".join([*lines, f"logs         {paths.logs}"])


def restarts_lines(restarts: Mapping[str, int]) -> list[str]:
    """Return "2 restarts: trainer 1, inference 1", or nothing if there were none."""
    total = sum(restarts.values())
    named = ", ".join(f"{name} {count}" for name, count in restarts.items() if count)
    return [f"{total} restart{'s' if total > 1 else ''}: {named}"] if total else []


def warning_lines(warnings: Sequence[Warned]) -> list[str]:
    """Return the newest warning of each kind, without the explanation that was printed when it came."""
    newest = {warned.name: warned for warned in warnings}
    counts = Counter(warned.name for warned in warnings)
    often = {name: f" (the last of {count})" if count > 1 else "" for name, count in counts.items()}
    return [f"{warning_text(warned).partition('. ')[0]}{often[name]}" for name, warned in newest.items()]


def held_out_lines(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return, for each environment, its first and its last evaluation.

    Example:
        held-out reverse-text: 0.412 -> 0.893 (versions 0 and 100)
    """
    lines = []
    for env in sorted({evaluation.env for evaluation in evaluations}):
        of_env = [evaluation for evaluation in evaluations if evaluation.env == env]
        first, last = of_env[0], of_env[-1]
        if first is last:
            lines.append(f"held-out {env}: {last.reward:.3f} (version {last.version})")
        else:
            versions = f"versions {first.version} and {last.version}"
            lines.append(f"held-out {env}: {first.reward:.3f} -> {last.reward:.3f} ({versions})")
    return lines


# a few rollouts of a batch, read from the journal from time to time


def samples_if_due(config: RunConfig, step: int) -> list[str]:
    """Return the texts of a batch's samples; none if its step is not due, or it cannot be read."""
    every = config.console.samples_every
    if every is None or (step + 1) % every:
        return []
    record = read_batch(config.paths.journal, step)
    chosen = choose(record.rollouts, config.console.num_samples) if record else []
    if len(chosen) == 1:
        return [sample_text(step, chosen[0])]
    return [sample_text(step, rollout, f" {index} of {len(chosen)}") for index, rollout in enumerate(chosen, 1)]


def read_batch(folder: Path, step: int) -> BatchRecord | None:
    from trireme.journal.journal import Journal  # numpy behind it is not for `rl --help` to wait for

    try:
        return Journal(folder).read(step)
    except (OSError, JournalCorrupt):
        return None


def choose(rollouts: Sequence[Rollout], count: int) -> Sequence[Rollout]:
    """Choose rollouts from all over a batch, in which those of an example are neighbours."""
    return rollouts[:: max(1, len(rollouts) // max(1, count))][:count]


def sample_text(step: int, rollout: Rollout, which: str = "") -> str:
    """Return the text of one sample, without the system prompt, which is the same in all examples.

    Example:
        === Step 5 Sample ===
        Prompt: Reverse the text: "hello"
        Completion: olleh
        Reward: 1.0
    """
    asked = [message for message in rollout.prompt if message.get("role") != "system"] or rollout.prompt
    prompt = "\n".join(message_text(message) for message in asked)
    return "\n".join(
        [
            f"=== Step {step + 1} Sample{which} ===",
            f"Prompt: {shortened(prompt, MOST_CHARACTERS)}",
            f"Completion: {shortened(conversation_text(rollout.completion), MOST_CHARACTERS)}",
            f"Reward: {rollout.reward:.4g}" + ("" if rollout.reward % 1 else ".0"),
        ]
    )


def conversation_text(messages: Sequence[Message]) -> str:
    """Return the text alone of a single message; otherwise each message under its role."""
    if len(messages) == 1:
        return message_text(messages[0])
    return "\n".join(f"[{message.get('role', '?')}] {message_text(message)}" for message in messages)


def message_text(message: Message) -> str:
    """Return the text of a message, with the names of its pictures, and its tool calls."""
    texts = [content_text(message.get("content"))]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else {}
        texts.append(f"{function.get('name', '?')}({as_text(function.get('arguments', ''))})")
    return "\n".join(filter(None, texts))
