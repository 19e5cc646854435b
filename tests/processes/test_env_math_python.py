"""The math-python environment: its problems, its tool in a real worker's sandbox, and the words of its tiny model."""

from __future__ import annotations

import json
import math
import re
import runpy
from pathlib import Path

import pytest

from toy_environments import import_shipped, packages_folder, run_one, with_package
from trireme.orchestrator.chat import ChatTokenizer
from trireme.orchestrator.environments.wire import Ask, Reply
from trireme.orchestrator.tool_calls import split_tool_calls

ROOT = Path(__file__).parents[2]
problems = import_shipped("math_python", "math_python_problems")


@pytest.fixture(scope="module")
def made() -> dict[int, list]:
    """Problems of each difficulty."""
    return {level: problems.make_problems(150, 0, difficulties=(level, level), seed=3)[0] for level in range(1, 6)}


def test_expressions_have_the_value_that_python_gives_them(made):
    for problem in made[1] + made[2]:
        assert eval(problem.question.removeprefix("Compute ").removesuffix(".")) == problem.answer


def num_divisors(n: int) -> int:
    return sum(1 + (d * d != n) for d in range(1, math.isqrt(n) + 1) if n % d == 0)


def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def grid_paths(width: int, height: int, column: int, row: int) -> int:
    """All paths, less those through the point."""
    through = math.comb(column + row, row) * math.comb(width + height - column - row, height - row)
    return math.comb(width + height, width) - through


def coin_ways(total: int, *coins: int) -> int:
    return (
        sum(coin_ways(total - coins[0] * n, *coins[1:]) for n in range(total // coins[0] + 1)) if coins else not total
    )


def term_of_sequence(first: int, second: int, p: int, q: int, index: int, modulus: int) -> int:
    terms = [0, first, second]
    while len(terms) <= index:
        terms.append(p * terms[-1] + q * terms[-2])
    return terms[index] % modulus


SEQUENCE = r"= (\d+) and a\(2\) = (\d+); .* = (\d+)\*a.*\+ (\d+)\*a.* of a\((\d+)\) divided by (\d+)"
SOLUTIONS = [
    (3, r"remainder of (\d+)\^(\d+) divided by (\d+)", lambda a, b, m: a**b % m),
    (3, r"digits of (\d+)\^(\d+)\?", lambda a, b: sum(map(int, str(a**b)))),
    (3, r"divisor of (\d+) and (\d+)\?", math.gcd),
    (
        3,
        r"divisors does (\d+) have",
        num_divisors,
    ),
    (4, r"prime numbers are there from (\d+) to (\d+)", lambda a, b: sum(map(is_prime, range(a, b + 1)))),
    (4, r"from 1 to (\d+) are divisible by (\d+) but not by (\d+)", lambda n, a, b: n // a - n // math.lcm(a, b)),
    (4, r"from (\d+) to (\d+) that read", lambda a, b: sum(n for n in range(a, b + 1) if str(n) == str(n)[::-1])),
    (5, r"to \((\d+), (\d+)\) without passing through \((\d+), (\d+)\)", grid_paths),
    (5, SEQUENCE, term_of_sequence),
]


@pytest.mark.parametrize(("difficulty", "pattern", "solve"), SOLUTIONS)
def test_answers_agree_with_another_way_to_compute_them(made, difficulty, pattern, solve):
    found = [(m, p.answer) for p in made[difficulty] if (m := re.search(pattern, p.question))]
    assert len(found) > 10
    for match, answer in found[:10]:
        assert solve(*map(int, match.groups())) == answer, match.string


def test_ways_to_pay_with_coins_are_as_many_as_by_trying_all(made):
    coins = next(problem for problem in made[5] if "cents" in problem.question)
    assert coin_ways(*sorted(map(int, re.findall(r"\d+", coins.question)), reverse=True)) == coins.answer


def test_training_never_sees_what_is_evaluated_whatever_the_seed():
    sets = [problems.make_problems(300, 60, difficulties=(1, 5), seed=seed) for seed in range(3)]
    assert [tuple(map(len, each)) for each in sets] == [(300, 60)] * 3
    train, evaluation = ({problem.question for each in sets for problem in each[part]} for part in (0, 1))
    assert not train & evaluation
    for difficulties in [(0, 1), (3, 2), (1, 6)]:
        with pytest.raises(ValueError, match="expected one of 1 to 5"):
            problems.make_problems(1, 1, difficulties=difficulties, seed=0)


def call(code: str, name: str = "python") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"


def test_code_runs_in_the_sandbox_and_its_output_comes_back_as_a_tool_message(tmp_path_factory):
    tokenizer = ChatTokenizer(ROOT / "models" / "math-python-tiny")

    async def use(environment):
        async def run(*turns: str):
            """By a policy that says these texts, whose calls are found as in a run."""
            questions: list[Ask] = []

            async def ask(question: Ask) -> Reply:
                questions.append(question)
                content, calls = split_tool_calls(turns[len(questions) - 1], len(questions))
                return Reply(content=content, tool_calls=calls or None, finish_reason="tool_calls" if calls else "stop")

            return (
                await run_one(environment, ask),
                [question.messages[-1]["content"] for question in questions],
                questions,
            )

        guess, (asked,), (first,) = await run("\\boxed{1}")
        expression = asked.removeprefix("Compute ").removesuffix(".")
        assert (guess.reward, guess.metrics["python_calls"], guess.metrics["has_answer"]) == (0.0, 0.0, 1.0)
        prompt = tokenizer.encode(tokenizer.render(first.messages, tools=first.tools, generate=True))
        assert len(prompt) < 30  # the tool as the template shows it is one token of the tiny model; see its words.json

        right, heard, _ = await run(call(f"print({expression})"), f"\\boxed{{{eval(expression):,}}}")
        assert heard[1] == right.answer
        assert (right.reward, right.metrics["python_calls"], right.metrics["tool_errors"]) == (1.0, 1.0, 0.0)

        connects = call("import socket; socket.create_connection(('127.0.0.1', 1))")
        failing, heard, _ = await run(call("1/0"), connects, call("", name="ruby"), "?")
        assert re.match(r"Error: Traceback(.|\n)*ZeroDivisionError: division by zero$", heard[1])
        assert re.search("Network is unreachable|not permitted", heard[2])
        assert (failing.reward, failing.metrics["tool_errors"], failing.metrics["has_answer"]) == (0.0, 3.0, 0.0)

        _, heard, _ = await run(call("import sympy; print(sympy.factorint(91))"), "\\boxed{0}")
        assert heard[1] == "{7: 1, 13: 1}"

    sizes = {"num_train": 5, "num_eval": 2, "max_output_chars": 200}
    args = sizes | {"difficulty": 1, "system_prompt": "", "timeout_s": 30}
    with_package(packages_folder(tmp_path_factory), "math-python", use, **args)


def test_the_tiny_models_warm_up_shows_calls_as_the_parser_reads_them_and_nothing_that_is_evaluated():
    tokenizer = ChatTokenizer(ROOT / "models" / "math-python-tiny")
    data = runpy.run_path(str(ROOT / "configs" / "math-python" / "sft_data.py"))
    conversations = [entry["messages"] for entry in data["conversations"](500)]
    assert not [messages for messages in conversations if problems.is_for_eval(messages[1]["content"])]
    called = [messages for messages in conversations[:60] if "tool_calls" in messages[2]]
    assert 20 < len(called) < 60
    for messages in called:
        before = tokenizer.render(messages[:2], tools=None, generate=True)
        after = tokenizer.render(messages[:3], tools=None, generate=False)
        content, (found,) = split_tool_calls(after.removeprefix(before).removesuffix("<|im_end|>\n"), 1)
        assert (content, found.name) == ("", "python")
        assert json.loads(found.arguments) == messages[2]["tool_calls"][0]["function"]["arguments"]
