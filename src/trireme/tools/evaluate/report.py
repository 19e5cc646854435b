"""What an evaluation found, for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from trireme.orchestrator.evaluation.results import EvalResult
from trireme.tools.environments.check_report import difficulty_in_words, rewards_of
from trireme.tools.evaluate.session import Session

_OWN = ("error_rate", "reward", "std", "truncated_frac", "tokens_mean", "turns_mean")
_SHOWN_REWARDS = 40
_SHOWN_TEXT = 2000


def to_table(evaluated: Sequence[tuple[str, Sequence[Session]]]) -> Table:
    """A line for each model and environment.

    Args:
        evaluated: by what the model is called.
    """
    sessions = [session for _, each in evaluated for session in each]
    measures = _measures(sessions)
    columns = ("model", "environment", "rollouts", *measures, "failed", "truncated", "tokens")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for model, each in evaluated:
        for session in each:
            metrics = session.metrics
            figures = [f"{metrics[name]:.3f}" if name in metrics else "-" for name in measures]
            table.add_row(model, session.environment.name, _extent(session), *figures, *_health(metrics))
    return table


def _measures(sessions: Sequence[Session]) -> list[str]:
    """avg@k, then every pass@k."""
    names = dict.fromkeys(name for session in sessions for name in session.metrics)
    return sorted((name for name in names if "@" in name), key=lambda name: (name[:4], int(name.partition("@")[2])))


def _extent(session: Session) -> str:
    return f"{len(session.extent.examples)} x {session.extent.rollouts_per_example}"


def _health(metrics: dict[str, float]) -> list[str]:
    truncated, tokens = metrics.get("truncated_frac"), metrics.get("tokens_mean")
    return [
        f"{metrics.get('error_rate', 0.0):.1%}",
        f"{truncated:.1%}" if truncated is not None else "-",
        f"{tokens:.0f}" if tokens else "-",
    ]


def as_json(evaluated: Sequence[tuple[str, Sequence[Session]]]) -> str:
    rows: list[dict[str, Any]] = [
        {"model": model, "environment": session.environment.name}
        | ({"results": str(session.file.path)} if session.file else {})
        | session.metrics
        for model, sessions in evaluated
        for session in sessions
    ]
    return json.dumps(rows, indent=1)


def text_of(session: Session) -> str:
    """One model on one environment."""
    metrics = session.metrics
    lines = [f"{session.environment.name} ({session.extent.split} examples), {session.policy.name}"]
    lines += [_line("rollouts", f"{_extent(session)}, {metrics.get('error_rate', 1.0):.1%} failed")]
    if "reward" in metrics:
        lines += [_line("reward", f"avg - {metrics['reward']:.3f}, std - {metrics['std']:.3f}")]
        lines += [_line(f"r{number}", _numbers(rewards)) for number, rewards in enumerate(_by_rollout(session), 1)]
        lines += [_line(name, f"{metrics[name]:.3f}") for name in metrics if name not in _OWN and name != "reward"]
        lines += [_line("truncated", f"{metrics['truncated_frac']:.1%}")]
        lines += [_line("tokens", f"{metrics['tokens_mean']:.1f} per rollout, {metrics['turns_mean']:.1f} turns")]
        if session.policy.is_policy:
            lines += [f"- {difficulty_in_words(rewards_of(_groups(session)))}"]
    return "\n".join([*lines, *_failures(session)])


def _by_rollout(session: Session) -> list[list[float]]:
    """The first rewards of each example's first rollout, of its second, …"""
    shown = session.extent.examples[:_SHOWN_REWARDS]
    return [
        [
            answer.reward
            for example in shown
            if (answer := session.results.get((example, rollout))) and answer.reward is not None
        ]
        for rollout in range(session.extent.rollouts_per_example)
    ]


def _groups(session: Session) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for answer in session.results.values():
        if answer.reward is not None:
            groups.setdefault(answer.example, []).append(answer.reward)
    return list(groups.values())


def _numbers(values: Sequence[float]) -> str:
    return f"[{', '.join(f'{value:.3g}' for value in values)}]" + (" …" if len(values) == _SHOWN_REWARDS else "")


def _failures(session: Session) -> list[str]:
    errors = [answer.error for answer in session.results.values() if answer.error is not None]
    kinds = {error: errors.count(error) for error in dict.fromkeys(errors)}
    return [f"{count} rollouts failed: {error}" for error, count in list(kinds.items())[:5]]


def conversation_of(answer: EvalResult) -> str:
    """One rollout, whole, to be looked through."""
    title = f"=== example {answer.example}, rollout {answer.rollout}"
    messages = [_message(message) for message in (*answer.prompt, *answer.completion)]
    if answer.error is not None:
        return "\n".join([title, f"failed: {answer.error}"])
    said = {name: round(value, 4) for name, value in answer.metrics.items()}
    end = [f"answer: {answer.answer!r}"] if answer.answer is not None else []
    end += [f"reward {answer.reward:g}, metrics {said}, stopped by {answer.stop}, {answer.tokens} tokens"]
    return "\n".join([title, *messages, *end])


def _message(message: dict[str, Any]) -> str:
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    called = "".join(f"\n  calls {call.get('name')}({call.get('arguments')})" for call in calls)
    text = str(message.get("content") or "")
    return f"[{message.get('role')}] {text[:_SHOWN_TEXT]}{' …' if len(text) > _SHOWN_TEXT else ''}{called}"


def mean_reward(sessions: Sequence[Session]) -> float | None:
    """Over environments, each counts the same."""
    found = [session.metrics["reward"] for session in sessions if "reward" in session.metrics]
    return float(np.mean(found)) if found else None


def _line(name: str, text: str) -> str:
    return f"  {name:14} {text}"
