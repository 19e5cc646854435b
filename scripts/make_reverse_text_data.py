"""Writes conversations about reversing a text, of mixed quality, to warm a model up before reinforcement learning.

    uv run python scripts/make_reverse_text_data.py FILE.jsonl [--num 20000] [--max-length 10] [--seed 0]

Only some answers are right. The others copy the text, shuffle it, or forget the tags, as data from the wild would: the
model learns how to reverse, but not that it should. Finding that out is what the reward is for. The texts are random
letters, so the words of the environment's held-out set are not among them but by chance.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

INSTRUCTION = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."

SHARES = {"reversed": 0.3, "copied": 0.3, "shuffled": 0.2, "untagged": 0.2}


def answer(kind: str, text: str, rng: random.Random) -> str:
    if kind == "untagged":
        return text[::-1]
    shown = {"reversed": text[::-1], "copied": text, "shuffled": "".join(rng.sample(text, len(text)))}[kind]
    return f"<reversed_text>{shown}</reversed_text>"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--num", type=int, default=20000)
    parser.add_argument("--min-length", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    with open(args.file, "w") as file:
        for _ in range(args.num):
            file.write(json.dumps(conversation(rng, args.min_length, args.max_length)) + "\n")
    print(f"{args.file}: {args.num} conversations")


if __name__ == "__main__":
    main()
