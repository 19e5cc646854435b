"""Reports of an evaluation: a table, and words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from trireme.base.safe_text import clean
from trireme.orchestrator.evaluation.results import EvalResult
from trireme.tools.conversation import blocks
from trireme.tools.evaluate.session import EvalSession
from trireme.tools.policies.rewards import difficulty_in_words, rewards_of

Evaluated = Sequence[tuple[str, Sequence[EvalSession]]]
"""Sessions by the name of the model, one for each environment."""

_MAX_REWARDS = 40
_MAX_CHARACTERS = 2000


def as_table(evaluated: Evaluated) -> Table:
    """Return a row for each model and environment, with avg@k and every pass@k."""
    names = {name for _, sessions in evaluated for session in sessions for name in session.metrics if "@" in name}
    measures = sorted(names, key=lambda name: (name[:4], int(name.partition("@")[2])))
    columns = ("model", "environment", "rollouts", *measures, "failed", "truncated", "tokens")
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for model, sessions in evaluated:
        for session in sessions:
            metrics = session.metrics
            table.add_row(
                model,
                session.environment.name,
                _extent(session),
                *(f"{metrics[name]:.3f}" if name in metrics else "-" for name in measures),
                f"{metrics.get('error_rate', 0.0):.1%}",
                f"{metrics['truncated_frac']:.1%}" if "truncated_frac" in metrics else "-",
                f"{metrics['tokens_mean']:.0f}" if metrics.get("tokens_mean") else "-",
            )
    return table


def _extent(session: EvalSession) -> str:
    return f"{len(session.extent.examples)} x {session.extent.rollouts_per_example}"


def text_of(session: EvalSession) -> str:
    """Describe one model on one environment: r1 has the rewards of each example's first rollout, r2 of its second."""
    metrics, results = session.metrics, session.results
    figures = {"rollouts": f"{_extent(session)}, {metrics.get('error_rate', 1.0):.1%} failed"}

    if "reward" in metrics:
        figures["reward"] = f"avg - {metrics['reward']:.3f}, std - {metrics['std']:.3f}"
        for rollout in range(session.extent.rollouts_per_example):
            shown = [results.get((example, rollout)) for example in session.extent.examples[:_MAX_REWARDS]]
            rewards = [result.reward for result in shown if result is not None and result.reward is not None]
            more = " …" if len(session.extent.examples) > _MAX_REWARDS else ""
            figures[f"r{rollout + 1}"] = f"[{', '.join(f'{reward:.3g}' for reward in rewards)}]{more}"

        own = ("error_rate", "reward", "std", "truncated_frac", "tokens_mean", "turns_mean")
        figures |= {name: f"{value:.3f}" for name, value in metrics.items() if name not in own}
        figures["truncated"] = f"{metrics['truncated_frac']:.1%}"
        figures["tokens"] = f"{metrics['tokens_mean']:.1f} per rollout, {metrics['turns_mean']:.1f} turns"
    earned = rewards_of((result.example, result.reward) for result in results.values())
    advice = [f"- {difficulty_in_words(earned)}"] if earned is not None else []

    errors = Counter(result.error for result in results.values() if result.error is not None)
    failures = [f"{count} rollouts failed: {error}" for error, count in list(errors.items())[:5]]

    lines = [f"  {name:14} {figure}" for name, figure in figures.items()]
    title = f"{session.environment.name} ({session.extent.split} examples), {session.policy.name}"
    return clean("\n".join([title, *lines, *advice, *failures]))


def conversation_of(result: EvalResult) -> str:
    """Show a whole rollout."""
    title = f"=== example {result.example}, rollout {result.rollout}"
    if result.error is not None:
        return clean(f"{title}\nfailed: {result.error}")
    lines = [title]
    for block in blocks([*result.prompt, *result.completion]):
        cut = " …" if len(block.text) > _MAX_CHARACTERS else ""
        lines.append(f"[{block.heading}] {block.text[:_MAX_CHARACTERS]}{cut}")
    if result.answer is not None:
        lines.append(f"answer: {result.answer!r}")
    metrics = {name: round(value, 4) for name, value in result.metrics.items()}
    lines.append(f"reward {result.reward:g}, metrics {metrics}, stopped by {result.stop}, {result.tokens} tokens")
    return clean("\n".join(lines))
