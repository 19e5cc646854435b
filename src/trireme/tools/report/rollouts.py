"""Rollouts to read: some of the first, the middle and the last batch, and what became of the same held-out example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trireme.journal.records import Rollout
from trireme.monitor.samples import choose, message_text, read_batch
from trireme.tools.report.facts import Facts, read_answers
from trireme.tools.report.page import Block, Conversation, Message, Section, Words
from trireme.tools.rollouts import clean

MOST_CHARACTERS = 1500  # of a message
MOST_MESSAGES = 12  # of a rollout


def rollouts_section(facts: Facts, count: int) -> Section | None:
    """None where there is no batch. Not chosen by how good they are: of the first groups of each batch, one each."""
    blocks: list[Block] = []
    for when, step in _times(facts.batches):
        record = read_batch(facts.paths.journal, step)
        if record is None:
            blocks.append(Words(f"Batch {step} cannot be read."))
            continue
        for rollout in choose(record.rollouts, count):
            blocks.append(_of_rollout(rollout, f"{when}, step {step + 1}"))
    head = Words("Not chosen by their rewards: of the first groups of each of these batches, one rollout each.")
    return Section("Rollouts", [head, *blocks]) if blocks else None


def _times(steps: Sequence[int]) -> list[tuple[str, int]]:
    if not steps:
        return []
    named = {steps[0]: "at the start", steps[len(steps) // 2]: "in the middle", steps[-1]: "at the end"}
    return sorted(((when, step) for step, when in named.items()), key=lambda pair: pair[1])


def _of_rollout(rollout: Rollout, when: str) -> Conversation:
    title = f"{when}: example {rollout.example} of {rollout.env}, reward {rollout.reward:.4g}"
    facts = {"answer": rollout.answer, "ended by": rollout.stop, "flaws": ", ".join(rollout.flaws)}
    tokens = sum(int(sample.loss_mask.sum()) for sample in rollout.samples)
    return _conversation(
        title, [*rollout.prompt, *rollout.completion], rollout.metrics, facts | {"tokens": str(tokens)}
    )


def held_out_section(facts: Facts) -> Section | None:
    """Of each environment those that gained and lost the most from the first evaluation to the last, by version."""
    by_env: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}
    for version, file in facts.evaluations():
        answers: dict[str, dict[str, Any]] = {}
        for answer in read_answers(file):
            answers.setdefault(str(answer.get("example_id", answer.get("example"))), answer)  # its first rollout
        by_env.setdefault(file.stem, {})[version] = answers
    blocks: list[Block] = []
    for env, versions in by_env.items():
        blocks += _of_environment(env, versions)
    return Section("Held-out examples", blocks) if blocks else None


def _of_environment(env: str, versions: Mapping[int, Mapping[str, dict[str, Any]]]) -> Iterator[Block]:
    first, last = min(versions), max(versions)
    common = [example for example in versions[first] if example in versions[last]]
    if first == last or not common:
        return
    gains = {example: versions[last][example]["reward"] - versions[first][example]["reward"] for example in common}
    best, worst = max(common, key=gains.__getitem__), min(common, key=gains.__getitem__)
    yield from _of_example(env, best, f"gained the most ({gains[best]:+.3g})", versions)
    if worst != best and gains[worst] < 0:
        yield from _of_example(env, worst, f"lost the most ({gains[worst]:+.3g})", versions)


def _of_example(
    env: str, example: str, why: str, versions: Mapping[int, Mapping[str, dict[str, Any]]]
) -> Iterator[Block]:
    """The question once, then one answer after the other; of many, the first, the middle and the last."""
    have = [version for version in sorted(versions) if example in versions[version]]
    shown = sorted({have[0], have[len(have) // 2], have[-1]})
    yield Words(f"Example {example} of {env}, which {why}:")
    for version in shown:
        answer = versions[version][example]
        prompt = _messages(answer.get("prompt"), "user") if version == shown[0] else []
        yield _conversation(
            f"version {version}: reward {answer['reward']:.4g}",
            [*prompt, *_messages(answer.get("completion"), "assistant")],
            answer.get("metrics") or {},
            {"answer": answer.get("answer")},
        )


def _messages(given: Any, role: str) -> list[dict[str, Any]]:
    """Files of other tools have texts there."""
    if isinstance(given, list):
        return [message for message in given if isinstance(message, dict)]
    return [{"role": role, "content": str(given)}] if given else []


def _conversation(
    title: str, messages: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any], facts: Mapping[str, Any]
) -> Conversation:
    numbers = {name: f"{value:.4g}" for name, value in metrics.items() if isinstance(value, int | float)}
    told = {name: _shorten(str(value)) for name, value in facts.items() if value}
    shown = [Message(_role(message), _shorten(message_text(dict(message)))) for message in messages[:MOST_MESSAGES]]
    if len(messages) > MOST_MESSAGES:
        shown.append(Message("", f"… and {len(messages) - MOST_MESSAGES} more messages"))
    return Conversation(clean(title), shown, list((numbers | told).items()))


def _role(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", ""))
    return role if role.isidentifier() else "other"


def _shorten(text: str) -> str:
    left = len(text) - MOST_CHARACTERS
    return clean(text if left <= 0 else f"{text[:MOST_CHARACTERS]} … ({left} more characters)")
