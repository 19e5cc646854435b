"""A task with answers of 183 tokens that a tiny model learns in a minute: 26 fields, each of which counts.

The prompt is a digit. The answer has a field for each letter, as in "a7-333;b7-000;...": the prompt's digit, and one of
the model's choice three times. The reward is the number of such fields over 26.
"""

from __future__ import annotations

import random
import re
import string
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import ROOT

SHAPE = "models/agent-tiny"  # its sizes and tokenizer; a character is a token
START = ROOT / "outputs" / "fields-start"
STEPS = 150
COPIED, REPEATED = 0.7, 0.6
"""Shares of fields with the prompt's digit, and of digits that repeat, in what the base model has learned from."""


def score(digit: str, answer: str) -> float:
    """Return the number of different right fields over that of letters; a letter that comes twice may count twice."""
    return min(1.0, len(set(re.findall(rf"([a-z]){digit}-(\d)\2\2;", answer))) / len(string.ascii_lowercase))


def conversations(num: int = 5000, seed: int = 0) -> list[dict]:
    """Return answers of mixed quality, from which a model learns how to copy and to repeat, but not that it should."""
    rng = random.Random(seed)
    return [
        {"messages": [{"role": "user", "content": digit}, {"role": "assistant", "content": _answer(digit, rng)}]}
        for digit in rng.choices(string.digits, k=num)
    ]


def _answer(digit: str, rng: random.Random) -> str:
    fields = []
    for letter in string.ascii_lowercase:
        chosen = rng.choice(string.digits)
        copied = digit if rng.random() < COPIED else rng.choice(string.digits)
        repeated = "".join(chosen if rng.random() < REPEATED else rng.choice(string.digits) for _ in range(2))
        fields.append(f"{letter}{copied}-{chosen}{repeated};")
    return "".join(fields)


def write_start() -> Path:
    """Return the folder of a base model that `sft` makes of random weights. They depend on its seed alone."""
    if START.exists():
        return START
    with TemporaryDirectory(dir=ROOT) as folder:
        flags = {"model.name": SHAPE, "data": __file__, "output-dir": folder, "name": "fields", "max-steps": STEPS}
        flags |= {"batch-size": 32, "seq-len": 256, "micro-batch-tokens": 512, "optim.lr": 3e-3}
        flags |= {"scheduler.type": "cosine", "scheduler.warmup-steps": 10, "scheduler.min-lr": 1e-4}
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        subprocess.run([sys.executable, "-m", "trireme.cli.sft", *words, "--model.from-scratch"], check=True, cwd=ROOT)
        START.parent.mkdir(exist_ok=True)
        (Path(folder) / "fields" / "weights" / f"step_{STEPS}").rename(START)
    return START


if __name__ == "__main__":
    write_start()
