"""Conversations about reversing a text, of mixed quality, to warm a model up before reinforcement learning.

Only some answers are right. The others copy the text, shuffle it, or forget the tags, like real data: the model
learns how to reverse, but not that it should. Reinforcement learning teaches that. The texts are random letters, so
they contain words of the environment's held-out set only by chance.
"""

from __future__ import annotations

import random
import string

INSTRUCTION = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."

SHARES = {"reversed": 0.25, "copied": 0.3, "shuffled": 0.2, "untagged": 0.25}


def conversations(num: int = 20000, min_length: int = 3, max_length: int = 10, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    return [conversation(rng, min_length, max_length) for _ in range(num)]


def conversation(rng: random.Random, min_length: int, max_length: int) -> dict:
    text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(min_length, max_length)))
    kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    return {
        "messages": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer(kind, text, rng)},
        ]
    }


def answer(kind: str, text: str, rng: random.Random) -> str:
    if kind == "untagged":
        return text[::-1]
    shown = {"reversed": text[::-1], "copied": text, "shuffled": "".join(rng.sample(text, len(text)))}[kind]
    return f"<reversed_text>{shown}</reversed_text>"
