"""The math-python environment: its problems, its tool in a real worker's sandbox, and the words of its tiny model."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import runpy
from pathlib import Path

import pytest

from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask
from trireme.orchestrator.tool_calls import split_tool_calls

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "environments"


@pytest.fixture(scope="module")
def problems():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENVIRONMENTS / "math_python")
        yield importlib.import_module("math_python_problems")


def made(problems, difficulty: int, count: int = 150) -> list:
    return problems.make_problems(count, 0, difficulties=(difficulty, difficulty), seed=3)[0]


@pytest.mark.parametrize("difficulty", [1, 2])
def test_expressions_have_the_value_that_python_gives_them(problems, difficulty):
    for problem in made(problems, difficulty):
        assert eval(problem.question.removeprefix("Compute ").removesuffix(".")) == problem.answer


def prime_count(low: int, high: int) -> int:
    sieve = bytearray([1]) * (high + 1)
    sieve[:2] = b"\0\0"
    for n in range(2, math.isqrt(high) + 1):
        sieve[n * n :: n] = bytes(len(sieve[n * n :: n]))
    return sum(sieve[low:])


def grid_paths(width: int, height: int, column: int, row: int) -> int:
    """All paths, less those through the point."""
    through = math.comb(column + row, row) * math.comb(width + height - column - row, height - row)
    return math.comb(width + height, width) - through


def coin_ways(total: int, coins: list[int]) -> int:
    if not coins:
        return total == 0
    return sum(coin_ways(total - used, coins[1:]) for used in range(0, total + 1, coins[0]))


def num_divisors(n: int) -> int:
    """Each one up to the root has a partner, but the root itself."""
    root = math.isqrt(n)
    return 2 * sum(n % d == 0 for d in range(1, root + 1)) - (root * root == n)


def common_divisor(a: int, b: int) -> int:
    """Some a / k, and k is small: the problems multiply a factor by less than 10,000."""
    return max(a // k for k in range(1, 10_000) if a % k == 0 and b % (a // k) == 0)


def palindrome_sum(low: int, high: int) -> int:
    return sum(n for n in range(low, high + 1) if int(str(n)[::-1]) == n)


SOLUTIONS = [
    (3, r"remainder of (\d+)\^(\d+) divided by (\d+)", lambda a, b, m: a**b % m),
    (3, r"digits of (\d+)\^(\d+)\?", lambda a, b: sum(int(digit) for digit in str(a**b))),
    (3, r"divisor of (\d+) and (\d+)\?", common_divisor),
    (3, r"divisors does (\d+) have", num_divisors),
    (4, r"prime numbers are there from (\d+) to (\d+)", prime_count),
    (4, r"from 1 to (\d+) are divisible by (\d+) but not by (\d+)", lambda n, a, b: n // a - n // math.lcm(a, b)),
    (4, r"from (\d+) to (\d+) that read the same", palindrome_sum),
    (5, r"to \((\d+), (\d+)\) without passing through \((\d+), (\d+)\)", grid_paths),
]


@pytest.mark.parametrize(("difficulty", "pattern", "solve"), SOLUTIONS)
def test_answers_agree_with_another_way_to_compute_them(problems, difficulty, pattern, solve):
    found = [(m, p.answer) for p in made(problems, difficulty) if (m := re.search(pattern, p.question))]
    assert len(found) > 10
    for match, answer in found[:10]:
        assert solve(*map(int, match.groups())) == answer, match.string


def test_coins_and_sequences_agree_with_their_definitions(problems):
    texts = made(problems, 5)
    coins = next(p for p in texts if "cents" in p.question)
    total, *kinds = map(int, re.findall(r"\d+", coins.question))
    assert coin_ways(total, sorted(kinds, reverse=True)) == coins.answer
    sequence = next(p for p in texts if "sequence" in p.question)
    pattern = r"= (\d+) and a\(2\) = (\d+); .* = (\d+)\*a.*\+ (\d+)\*a.* of a\((\d+)\) divided by (\d+)"
    numbers = re.search(pattern, sequence.question)
    first, second, p, q, index, modulus = map(int, numbers.groups())
    terms = [0, first, second]
    while len(terms) <= index:
        terms.append(p * terms[-1] + q * terms[-2])
    assert terms[index] % modulus == sequence.answer


def test_training_never_sees_what_is_evaluated_whatever_the_seed(problems):
    train, evaluation = set(), set()
    for seed in range(3):
        some, other = problems.make_problems(300, 60, difficulties=(1, 5), seed=seed)
        assert (len(some), len(other)) == (300, 60)
        train |= {problem.question for problem in some}
        evaluation |= {problem.question for problem in other}
    assert not train & evaluation


@pytest.mark.parametrize("difficulties", [(0, 1), (3, 2), (1, 6)])
def test_a_difficulty_that_there_is_not_is_refused(problems, difficulties):
    with pytest.raises(ValueError, match="expected one of 1 to 5"):
        problems.make_problems(1, 1, difficulties=difficulties, seed=0)


def scripted(*turns: str):
    """A policy that says these texts, whose calls are found as in a run. Keeps what it was asked."""
    questions: list[Ask] = []

    async def ask(question: Ask) -> Reply:
        questions.append(question)
        content, calls = split_tool_calls(turns[len(questions) - 1], len(questions))
        return Reply(content=content, tool_calls=calls or None, finish_reason="tool_calls" if calls else "stop")

    return ask, questions


def call(code: str, name: str = "python") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


@pytest.mark.e2e
def test_code_runs_in_the_sandbox_and_its_output_comes_back_as_a_tool_message(tmp_path):
    tokenizer = ChatTokenizer(ROOT / "models" / "math-python-tiny")

    async def main():
        args = {
            "difficulty": 1,
            "num_train": 5,
            "num_eval": 2,
            "system_prompt": "",
            "timeout_s": 5,
            "max_output_chars": 200,
        }
        config = EnvironmentConfig(id="math-python", args=args)
        async with open_environment(
            config, logs=tmp_path / "logs", root=ENVIRONMENTS, cache=tmp_path / "cache", load_timeout_s=300
        ) as environment:

            async def run(*turns):
                ask, questions = scripted(*turns)
                return await environment.run(RunTask(task="r", index=0), ask), questions

            guess, asked = await run("\\boxed{1}")
            expression = asked[0].messages[-1]["content"].removeprefix("Compute ").removesuffix(".")
            prompt = tokenizer.encode(tokenizer.render(asked[0].messages, tools=asked[0].tools, generate=True))
            right = await run(call(f"print({expression})"), f"\\boxed{{{eval(expression):,}}}")
            failing = await run(
                call("1/0"),
                call("import socket; socket.create_connection(('127.0.0.1', 1))"),
                call("", name="ruby"),
                "?",
            )
            packages = await run(call("import sympy; print(sympy.factorint(91))"), "\\boxed{0}")
            return guess, prompt, right, failing, packages

    guess, prompt, (right, asked), (failing, failures), (_, packages) = asyncio.run(main())
    assert (guess.reward, guess.metrics["python_calls"], guess.metrics["has_answer"]) == (0.0, 0.0, 1.0)
    assert len(prompt) < 30  # the tool as the template shows it is one token of the tiny model; see its words.json
    (made_call,) = asked[1].messages[-2]["tool_calls"]
    assert asked[1].messages[-1] == {"role": "tool", "content": right.answer, "tool_call_id": made_call["id"]}
    assert (right.reward, right.metrics["python_calls"], right.metrics["tool_errors"]) == (1.0, 1.0, 0.0)
    contents = [question.messages[-1]["content"] for question in failures[1:]]
    assert contents[0].startswith("Error: Traceback")
    assert contents[0].endswith("ZeroDivisionError: division by zero")
    assert "Network is unreachable" in contents[1] or "not permitted" in contents[1]
    assert (failing.reward, failing.metrics["tool_errors"], failing.metrics["has_answer"]) == (0.0, 3.0, 0.0)
    assert packages[1].messages[-1]["content"] == "{7: 1, 13: 1}"


def test_the_tiny_models_warm_up_shows_calls_as_the_parser_reads_them():
    tokenizer = ChatTokenizer(ROOT / "models" / "math-python-tiny")
    data = runpy.run_path(str(ROOT / "configs" / "math-python" / "sft_data.py"))
    conversations = [entry["messages"] for entry in data["conversations"](60)]
    called = [messages for messages in conversations if "tool_calls" in messages[2]]
    assert 20 < len(called) < 60
    for messages in called:
        before = tokenizer.render(messages[:2], tools=None, generate=True)
        turn = (
            tokenizer.render(messages[:3], tools=None, generate=False).removeprefix(before).removesuffix("<|im_end|>\n")
        )
        content, (found,) = split_tool_calls(turn, 1)
        assert (content, found.name) == ("", "python")
        assert json.loads(found.arguments) == messages[2]["tool_calls"][0]["function"]["arguments"]


def test_the_tiny_models_warm_up_holds_nothing_that_is_evaluated(problems):
    data = runpy.run_path(str(ROOT / "configs" / "math-python" / "sft_data.py"))
    assert not [e for e in data["conversations"](500) if problems.is_for_eval(e["messages"][1]["content"])]
