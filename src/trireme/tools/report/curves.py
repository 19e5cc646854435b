"""The plots of a run: rewards, then whatever its processes measured of what is worth a look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from trireme.tools.report.facts import Facts
from trireme.tools.report.page import Block, Figure, Section, Words
from trireme.tools.report.plots import COLOURS, Line, line_figure


class Chart(NamedTuple):
    """One plot, drawn where there is any of its metrics."""

    name: str
    title: str
    metrics: dict[str, str]  # name -> label
    log: bool = False


CHARTS = (
    Chart("loss", "Loss", {"loss": "loss"}),
    Chart("validation", "Loss on held-out data", {"validation/loss": "held-out loss"}),
    Chart("accuracy", "Held-out tokens that were the likeliest", {"validation/accuracy": "accuracy"}),
    Chart("grad_norm", "Norm of the gradient, before it is clipped", {"grad_norm": "norm"}, log=True),
    Chart("entropy", "Entropy of the policy (nats)", {"policy/entropy": "entropy"}),
    Chart("kl", "KL to the policy that sampled; engine to trainer", {"policy/kl": "policy", "mismatch_kl": "engine"}),
    Chart("ratio", "Importance ratio", {"importance_ratio": "mean ratio", "ess": "effective share of samples"}),
    Chart("reference", "KL to the reference model", {"reference_kl": "KL"}),
    Chart(
        "signal",
        "Shares of groups and rollouts",
        {"groups/signal_frac": "groups with signal", "truncated_frac": "truncated", "rollouts/error_rate": "failed"},
    ),
    Chart("lengths", "Tokens of a rollout", {"tokens/completion_mean": "mean", "tokens/completion_max": "longest"}),
    Chart("turns", "Turns of a rollout", {"turns/mean": "mean"}),
    Chart("lag", "Age of tokens (versions)", {"lag/mean": "mean", "lag/max": "oldest"}),
    Chart("speed", "Tokens trained on per second", {"perf/tokens_per_s": "tokens/s"}),
    Chart("step_time", "Seconds of a step", {"time/step": "step", "time/wait_for_batch": "of it, waiting"}, log=True),
    Chart("memory", "Memory of a step (GiB)", {"perf/peak_memory_gib": "peak"}),
    Chart("lr", "Learning rate", {"lr": "lr"}),
)
CONSTANT = ("turns", "lr", "memory", "accuracy")
"""Not worth a plot where it never changes."""

MOST_ENVIRONMENTS = len(COLOURS)


def curves_section(facts: Facts) -> Section:
    blocks: list[Block] = [figure for figure in (*_rewards(facts), *_metrics(facts)) if figure]
    return Section("Curves", blocks or [Words("No step has been measured yet.")])


def _rewards(facts: Facts) -> Iterator[Figure]:
    """In training and held out, of all environments or of each."""
    trained = facts.points("reward/mean")
    held_out = [Line(f"held out: {env}", points, dots=True) for env, points in facts.evaluated().items()]
    lines = ([Line("in training", trained)] if trained else []) + held_out
    if lines:
        yield line_figure("reward", "Mean reward", lines[:MOST_ENVIRONMENTS], wide=True)
    environments = [name.split("/")[1] for name in facts.names if name.startswith("reward/") and name.count("/") == 2]
    several = sorted(set(environments))
    if len(several) > 1:
        each = [Line(env, facts.points(f"reward/{env}/mean")) for env in several[:MOST_ENVIRONMENTS]]
        yield line_figure("rewards", "Mean reward in training, by environment", each, wide=True)


def _metrics(facts: Facts) -> Iterator[Figure]:
    for chart in CHARTS:
        lines = [Line(label, facts.points(name)) for name, label in chart.metrics.items() if facts.points(name)]
        if lines and not (chart.name in CONSTANT and _is_constant(lines)):
            yield line_figure(chart.name, chart.title, lines, log=chart.log)


def _is_constant(lines: list[Line]) -> bool:
    return all(len({value for _, value in line.points}) == 1 for line in lines)
