"""Conversations about sorting letters, of mixed quality, to warm a model up before reinforcement learning.

Only some answers are right. The others forget the marks, the tags or the earlier letters, or do not sort at all: the
model learns how to sort and to mark, but not that it should. The letters are those of training episodes.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "environments/alphabet_sort"))

from alphabet_sort_episodes import FIRST_TAG, LATER_TAG, MARK, Episode, make_episodes

SHARES = {"right": 0.2, "unmarked": 0.2, "only the new": 0.2, "unsorted": 0.2, "untagged": 0.2}


def conversations(num: int = 20000, seed: int = 1) -> list[dict]:
    episodes, _ = make_episodes(
        num, 0, num_turns=(2, 3), names_per_turn=(1, 4), items="letters", sort_by="any", seed=seed
    )
    rng = random.Random(seed)
    return [{"messages": conversation(episode, rng)} for episode in episodes]


def conversation(episode: Episode, rng: random.Random) -> list[dict]:
    messages = []
    for turn, question in enumerate(episode.prompts()):
        kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer(kind, episode, turn, rng)})
    return messages


def answer(kind: str, episode: Episode, turn: int, rng: random.Random) -> str:
    lines = lines_of(kind, episode.expected()[turn], episode.turns[turn], rng)
    tag = LATER_TAG if turn else FIRST_TAG
    return "\n".join(lines if kind == "untagged" else [f"<{tag}>", *lines, f"</{tag}>"])


def lines_of(kind: str, expected: list[str], new: tuple[str, ...], rng: random.Random) -> list[str]:
    if kind == "unmarked":
        return [line.removesuffix(f" {MARK}") for line in expected]
    if kind == "only the new":
        return [line for line in expected if line[0] in new]
    if kind == "unsorted":
        return rng.sample(expected, len(expected))
    return expected
