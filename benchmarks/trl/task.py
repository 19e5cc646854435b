"""The tasks that both sides learn: the same prompts, the same reward. Needs the standard library only.

Ours loads this file as an environment, theirs imports it. `delay_s` is how long the environment takes per turn.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "environments" / "reverse_text"))
from reverse_text_task import SYSTEM_PROMPT, make_texts, similarity

ANSWER = re.compile(r"<reversed_text>\s*(.*?)\s*</reversed_text>", re.DOTALL)
MARK = "a"
"""The countdown models mark every word of an answer with it or not, by chance."""


def dataset(
    kind: str = "reverse", delay_s: float = 0.0, spread: str = "", num_train: int = 600
) -> list[dict[str, Any]]:
    """
    Args:
        kind: "reverse", the quickstart's texts; or "countdown", one prompt whose answers have lengths of that spread.
    """
    if kind == "countdown":
        return [_countdown(number, spread, delay_s) for number in range(64)]
    texts, _ = make_texts(num_train, 0, min_length=3, max_length=8, seed=0)
    return [_reverse(text, delay_s) for text in texts]


def _reverse(text: str, delay_s: float) -> dict[str, Any]:
    prompt = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
    return {"prompt": prompt, "answer": text[::-1], "delay_s": delay_s}


def _countdown(number: int, spread: str, delay_s: float) -> dict[str, Any]:
    """Different prompts, which the model does not tell apart."""
    words = " ".join(f"n{(number * 7 + place) % 100}" for place in range(12))
    return {"prompt": [{"role": "user", "content": f"{words} {spread}"}], "answer": "", "delay_s": delay_s}


async def reward(completion: str, answer: str, delay_s: float) -> float:
    if delay_s:
        await asyncio.sleep(delay_s)
    return score(completion, answer)


def score(completion: str, answer: str) -> float:
    """Return how like the reversed text the answer is; if there is no such text, the share of marked words."""
    if answer:
        found = ANSWER.search(completion)
        return similarity(found.group(1) if found else None, answer)
    words = completion.split()
    return sum(word.startswith(MARK) for word in words) / max(1, len(words))
