"""Evaluations by `eval`: two environments, an engine whose answers are of its weights, and what was saved."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.engines.fake_chat import served
from support.engines.weighed_engine import WeighedEngine, open_weighed_engine
from trireme.cli.eval import eval as eval_command

TOY = """
def dataset():
    return [{"prompt": f"say {i}", "answer": str(i)} for i in range(40)]

def eval_dataset():
    return [{"prompt": "held out", "answer": str(i)} for i in range(6)]

def reward(completion):
    return "_abcd".index(completion) / 10
"""

SAY = """
def dataset(size=12):
    return [{"prompt": f"say {i}", "answer": "yes" if i % 2 else "no"} for i in range(size)]

def reward(completion, answer):
    return float(completion == answer)
"""


@contextmanager
def engine(base: str = "base", **knobs: Any) -> Iterator[WeighedEngine]:
    """Yield an engine that answers with a letter of its weights."""
    with served(lambda: open_weighed_engine(Path(base).resolve(), **knobs)) as found:
        yield found


def run_eval(engine: WeighedEngine, *words: str | int, env: tuple[str, ...] = ("--env.id", "toy.py")) -> int:
    where = ["--client.base-url", f"{engine.url}/v1", "--weights-dir", "run/weights"]
    return eval_command([*where, *env, *map(str, words)])


def lines(step: int, name: str = "toy") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("run/evals", f"step_{step}", f"{name}.jsonl").read_text().splitlines()]


def means() -> list[float]:
    """Return the mean reward of each checkpoint, the base model's first."""
    found = [[line["reward"] for line in lines(step)] for step in (0, 10, 20, 100)]
    return [sum(rewards) / len(rewards) for rewards in found]


def letters(found: WeighedEngine) -> str:
    """What was answered, one letter for each six answers in a row."""
    answered = "".join(letter for _, letter in found.answered)
    assert answered == "".join(6 * letter for letter in answered[::6])
    return answered[::6]
