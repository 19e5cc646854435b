"""Conversations on expressions and a Python tool, of mixed quality, to warm a model up before reinforcement learning.

Some call the tool, read its answer and repeat it in a box. The others guess, forget to print, mistype the expression,
or forget the box: the model learns to use the tool, but not that it should. Finding that out is what the reward is for.
None of the expressions is one that the environment evaluates on.
"""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOOLS = json.loads(Path(__file__).with_name("words.json").read_text())[0]  # as the chat template shows the tool
SHARES = {"computed": 0.3, "guessed": 0.35, "silent": 0.15, "mistyped": 0.1, "unboxed": 0.1}


def conversations(num: int = 6000, seed: int = 1) -> list[dict]:
    problems = runpy.run_path(str(ROOT / "environments" / "math_python" / "math_python_problems.py"))
    train, _ = problems["make_problems"](num, 0, difficulties=(1, 1), seed=seed)
    rng = random.Random(seed)
    return [conversation(rng, problem.question, problem.answer) for problem in train]


def conversation(rng: random.Random, question: str, answer: int) -> dict:
    kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
    expression = question.removeprefix("Compute ").removesuffix(".")
    said = [{"role": "system", "content": TOOLS}, {"role": "user", "content": question}]
    return {"messages": said + turns(rng, kind, expression, answer)}


def turns(rng: random.Random, kind: str, expression: str, answer: int) -> list[dict[str, Any]]:
    if kind == "guessed":
        return [says(f"\\boxed{{{guess(rng, answer)}}}")]
    if kind == "silent":
        return [*calls(expression, "(the code printed nothing)"), says(f"\\boxed{{{guess(rng, answer)}}}")]
    written = mistyped(rng, expression) if kind == "mistyped" else expression
    shown = str(eval(written))
    return [*calls(f"print({written})", shown), says(shown if kind == "unboxed" else f"\\boxed{{{shown}}}")]


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(code: str, shown: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
    return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": shown}]


def guess(rng: random.Random, answer: int) -> int:
    """Return a wrong guess of about the right size."""
    return rng.randint(answer // 2, 2 * answer)


def mistyped(rng: random.Random, expression: str) -> str:
    place = rng.choice([place for place, character in enumerate(expression) if character.isdigit()])
    return expression[:place] + rng.choice("123456789") + expression[place + 1 :]
