"""Writes conversations that reverse a text, to warm a model up before reinforcement learning.

    uv run python scripts/make_reverse_text_data.py FILE.jsonl [--num 20000] [--max-length 10] [--seed 0]

The texts are random letters, so no word of the environment's held-out set is among them but by chance.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path


INSTRUCTION = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


def conversation(text: str) -> dict:
    return {
        "messages": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"<reversed_text>{text[::-1]}</reversed_text>"},
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
            length = rng.randint(args.min_length, args.max_length)
            text = "".join(rng.choices(string.ascii_lowercase, k=length))
            file.write(json.dumps(conversation(text)) + "\n")
    print(f"{args.file}: {args.num} conversations")


if __name__ == "__main__":
    main()
