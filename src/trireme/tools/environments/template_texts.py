"""What `trireme env init` writes. `@NAME@` and `@MODULE@` are filled in."""

from __future__ import annotations

VERIFIERS = "verifiers==0.2.0"

PROJECT = """\
[build-system]
requires = ["hatchling==1.33.0"]
build-backend = "hatchling.build"

[project]
name = "@NAME@"
version = "0.1.0"
description = "What the model is to learn, in one line."
readme = "README.md"
requires-python = ">=3.11,<3.14"
dependencies = [@DEPENDENCIES@]

[tool.hatch.build.targets.wheel]
include = ["@MODULE@.py"]
"""

README = """\
# @NAME@

What the model is given, what it is to do, and where the examples come from.

```toml
[[orchestrator.env]]
id = "@NAME@"
args = { num_train = 200 }
```

| argument | default | meaning |
|---|---|---|
| `num_train` | 200 | examples to train on |
| `num_eval` | 50 | examples held out for evaluation |
| `seed` | 0 | another seed, other examples |

**Reward**: @REWARD@

```
uv run trireme env check @NAME@                    # does it work?
uv run trireme env check @NAME@ --model MODEL      # how hard is it for this model?
```
"""

REWARDS = {
    "verifiers": "1 where the last word of the answer is the sum, else 0; 0.1 more for an answer of one word.",
    "plain": "1 for the sum and nothing else, 0.5 where it stands somewhere in the answer, else 0.",
    "tool": "1 where the last answer holds the product, else 0; 0.2 more for having called the tool.",
    "multi-turn": "1 for the number, less 0.1 for each guess after the first, 0 where it was not found.",
}

_PLAIN = '''\
"""@NAME@: a data set and a reward function; no framework."""

import random


def load_environment(num_train=200, num_eval=50, seed=0):
    """The keyword arguments are what `args` of `[[orchestrator.env]]` may hold."""
    examples = make_examples(num_train + num_eval, seed=seed)
    return {"dataset": examples[:num_train], "eval_dataset": examples[num_train:], "reward": reward}


def make_examples(count, *, seed):
    """`prompt` is text, or a list of chat messages. The other fields are for `reward`, by name."""
    pairs = random.Random(seed).sample([(a, b) for a in range(100) for b in range(100)], count)
    return [{"prompt": f"What is {a} + {b}? Answer with the number.", "answer": str(a + b)} for a, b in pairs]


def reward(completion, answer):
    """A number, or {"reward": number, "any_metric": number}. It may be `async`."""
    exact = float(completion.strip() == answer)
    return {"reward": max(exact, 0.5 * (answer in completion)), "exact": exact}
'''

_VERIFIERS = '''\
"""@NAME@: one question, one answer."""

import random

import verifiers as vf
from datasets import Dataset

SYSTEM_PROMPT = "Answer with the number, and nothing else."


def load_environment(num_train: int = 200, num_eval: int = 50, seed: int = 0) -> vf.Environment:
    """The keyword arguments are what `args` of `[[orchestrator.env]]` may hold."""
    examples = make_examples(num_train + num_eval, seed=seed)
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(examples[:num_train]),
        eval_dataset=Dataset.from_list(examples[num_train:]) if num_eval else None,
        system_prompt=SYSTEM_PROMPT,
        rubric=vf.Rubric(funcs=[right_answer, one_word], weights=[1.0, 0.1]),
    )


def make_examples(count: int, *, seed: int) -> list[dict[str, str]]:
    pairs = random.Random(seed).sample([(a, b) for a in range(100) for b in range(100)], count)
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def right_answer(completion: vf.Messages, answer: str) -> float:
    words = said(completion).split()
    return float(bool(words) and words[-1].strip(".") == answer)


def one_word(completion: vf.Messages) -> float:
    return float(len(said(completion).split()) == 1)


def said(completion: vf.Messages) -> str:
    return completion[-1].content or ""
'''

_TOOL = '''\
"""@NAME@: the model may call a tool before it answers."""

import random

import verifiers as vf
from datasets import Dataset

MAX_TURNS = 4


def load_environment(num_train: int = 200, num_eval: int = 50, seed: int = 0) -> vf.Environment:
    """The keyword arguments are what `args` of `[[orchestrator.env]]` may hold."""
    examples = make_examples(num_train + num_eval, seed=seed)
    return vf.ToolEnv(
        dataset=Dataset.from_list(examples[:num_train]),
        eval_dataset=Dataset.from_list(examples[num_train:]) if num_eval else None,
        tools=[multiply],
        max_turns=MAX_TURNS,
        rubric=vf.Rubric(funcs=[right_answer, called_the_tool], weights=[1.0, 0.2]),
    )


def make_examples(count: int, *, seed: int) -> list[dict[str, str]]:
    pairs = random.Random(seed).sample([(a, b) for a in range(100, 1000) for b in range(100, 1000)], count)
    return [{"question": f"What is {a} * {b}?", "answer": str(a * b)} for a, b in pairs]


def multiply(a: int, b: int) -> int:
    """Multiplies two whole numbers.

    Args:
        a: the first
        b: the second
    """
    return int(a) * int(b)


def right_answer(completion: vf.Messages, answer: str) -> float:
    last = completion[-1]
    return float(last.role == "assistant" and answer in (last.content or ""))


def called_the_tool(completion: vf.Messages) -> float:
    return float(any(message.role == "tool" for message in completion))
'''

_MULTI_TURN = '''\
"""@NAME@: a game over several turns. The model guesses a number and is told whether it is higher or lower."""

import random
import re

import verifiers as vf
from datasets import Dataset

HIGHEST = 31
MAX_TURNS = 6
PROMPT = f"I think of a whole number from 1 to {HIGHEST}. Guess it. Answer with a number, and nothing else."


def load_environment(
    num_train: int = 200, num_eval: int = 50, seed: int = 0, max_turns: int = MAX_TURNS
) -> vf.Environment:
    """The keyword arguments are what `args` of `[[orchestrator.env]]` may hold."""
    numbers = random.Random(seed).choices(range(1, HIGHEST + 1), k=num_train + num_eval)
    examples = [{"question": PROMPT, "answer": str(number)} for number in numbers]
    return GuessingGame(
        dataset=Dataset.from_list(examples[:num_train]),
        eval_dataset=Dataset.from_list(examples[num_train:]) if num_eval else None,
        max_turns=max_turns,
        rubric=vf.Rubric(funcs=[found]),
    )


class GuessingGame(vf.MultiTurnEnv):
    @vf.stop
    async def is_found(self, state: vf.State) -> bool:
        """Asked before each turn of the model; `max_turns` is looked after by verifiers."""
        said = [step["completion"][-1].content for step in state["trajectory"]]
        return bool(said) and guess_in(said[-1]) == int(state["answer"])

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        """What the model is told after its turn."""
        guess, number = guess_in(messages[-1].content), int(state["answer"])
        if guess is None:
            return [vf.UserMessage(content="That is no number.")]
        return [vf.UserMessage(content="Higher." if guess < number else "Lower.")]


def found(completion: vf.Messages, answer: str) -> float:
    said = [message.content for message in completion if message.role == "assistant"]
    right = bool(said) and guess_in(said[-1]) == int(answer)
    return max(0.0, 1.1 - 0.1 * len(said)) if right else 0.0


def guess_in(text: str | None) -> int | None:
    """The first number of at most four digits: a text of thousands of digits is no guess."""
    match = re.search(r"(?<!\\d)\\d{1,4}(?!\\d)", text or "")
    return int(match[0]) if match else None
'''

MODULES = {"verifiers": _VERIFIERS, "plain": _PLAIN, "tool": _TOOL, "multi-turn": _MULTI_TURN}
