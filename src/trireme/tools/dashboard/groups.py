"""Which metrics belong together, and in which order they are looked at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class Group(NamedTuple):
    title: str
    note: str
    pattern: str


GROUPS = (
    Group("Reward", "what the policy is paid; of the batch that each step trains on", r"reward(/|$)"),
    Group("Evaluation", "held-out examples, by version of the weights", r"eval/|time/eval$|validation/"),
    Group(
        "Loss",
        "the step: loss, gradient, learning rate, what was clipped or masked",
        r"(loss|loss_tokens|perplexity|epoch|grad_norm|lr|learning_rate|skipped_\w+|masked_frac|capped_frac)$|clip_frac/",
    ),
    Group(
        "Policy",
        "how far it has moved, and whether trainer and engine agree",
        r"policy/|(importance_ratio|ess|mismatch_kl|reference_kl)$",
    ),
    Group("Lag", "age of the tokens that are trained on, in versions", r"lag/"),
    Group(
        "Rollouts",
        "lengths, turns, groups with signal, what was dropped or filtered",
        r"(rollouts|groups|filters|tokens|turns)/|truncated_frac$",
    ),
    Group("Time", "where the seconds of a step go", r"time/|(engine/)?idle_frac$"),
    Group("Performance", "speed, memory, packing, weights in passing", r"(perf|weights|moe|engine|inference)/"),
    Group("Environments", "by environment: rewards' components, lengths, failures", r"env/"),
    Group("Data", "epochs, difficulty pools, curriculum", r"(data|curriculum)/"),
)
OTHERS = Group("Other", "whatever else processes report", r"")

FIRST = ("reward/mean", "eval/[^/]+/reward", "loss", "perplexity", "time/step", "perf/tokens_per_s", "policy/entropy")
"""Of their groups."""

_PROCESS = re.compile(r"^(orchestrator|supervisor|sft)/")


def grouped(names: Iterable[str]) -> dict[Group, list[str]]:
    """Groups that have any, each with its names; what matters most first."""
    found: dict[Group, list[str]] = {group: [] for group in (*GROUPS, OTHERS)}
    for name in sorted(names, key=_order):
        found[group_of(name)].append(name)
    return {group: members for group, members in found.items() if members}


def group_of(name: str) -> Group:
    bare = _PROCESS.sub("", name)
    return next((group for group in GROUPS if re.match(group.pattern, bare)), OTHERS)


def _order(name: str) -> tuple[int, str]:
    place = next((place for place, first in enumerate(FIRST) if re.fullmatch(first, name)), len(FIRST))
    return place, name


def matching(names: Iterable[str], wanted: str) -> list[str]:
    """Names that have all the words in them."""
    words = wanted.lower().split()
    return [name for name in names if all(word in name.lower() for word in words)]
