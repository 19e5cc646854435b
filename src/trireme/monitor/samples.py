"""Sample texts: a few rollouts of a batch, read from the journal from time to time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.base.errors import JournalCorrupt
from trireme.base.safe_text import shortened
from trireme.config.run import RunConfig
from trireme.journal.message_text import as_text, content_text

if TYPE_CHECKING:
    from trireme.journal.records import BatchRecord, Rollout

MOST_CHARACTERS = 2000  # limit for a prompt, and for a completion

Message = dict[str, Any]


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
