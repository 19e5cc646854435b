"""The gsm8k environment: numbers as they are written, problems and their answers, and the whole in a worker."""

from __future__ import annotations

import asyncio
import importlib
import re
from fractions import Fraction
from pathlib import Path

import pytest

from trireme.base.errors import ConfigError
from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


@pytest.fixture(scope="module", autouse=True)
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENVIRONMENTS / "gsm8k")
        yield


@pytest.fixture
def answers():
    return importlib.import_module("gsm8k_answers")


@pytest.fixture
def problems():
    return importlib.import_module("gsm8k_problems")


@pytest.mark.parametrize(
    "text",
    [
        "1234",
        "1,234",
        "$1,234",
        r"\$1{,}234",
        "1234.",
        "1234.00",
        r"\frac{2468}{2}",
        "2468/2",
        r"1234 \text{ apples}",
        "+1234",
    ],
)
def test_one_number_in_all_its_spellings(answers, text):
    assert answers.to_number(text) == 1234
    assert answers.is_same_number(text, "1234")


@pytest.mark.parametrize(
    "text", ["", "-", ".", "twelve", "1/0", "12 13x", "1,23", "1e9", "nan", "9" * 101, "١٢", "3/4/5"]
)
def test_what_is_no_number_equals_nothing(answers, text):
    assert answers.to_number(text) is None
    assert not answers.is_same_number(text, text)


def test_numbers_are_exact(answers):
    assert answers.to_number("0.1") == Fraction(1, 10)
    assert answers.to_number("-3/4") == Fraction(-3, 4)
    assert not answers.is_same_number("0.3333333333333333", "1/3")


def test_problems_differ_and_training_never_sees_what_is_evaluated_whatever_the_seed(problems):
    train, evaluation = set(), set()
    for seed in range(3):
        some, other = problems.make_problems(200, 40, seed=seed)
        assert (len(some), len(other)) == (200, 40)
        assert len({problem.question for problem in some}) == 200
        train |= {problem.question for problem in some}
        evaluation |= {problem.question for problem in other}
    assert not train & evaluation
    assert problems.make_problems(20, 5, seed=7) == problems.make_problems(20, 5, seed=7)


def find(problems, pattern: str) -> tuple[dict[str, int], int]:
    """The numbers of the first problem of that form, and its answer."""
    for problem in problems.make_problems(2000, 0, seed=0)[0]:
        if match := re.search(pattern, problem.question):
            return {name: int(value) for name, value in match.groupdict().items()}, problem.answer
    raise AssertionError(f"no problem like {pattern}")


BUSES = r"(?P<n>\d+) classes of (?P<p>\d+) .* (?P<t>\d+) teachers\. A bus has (?P<s>\d+)"
DRIVE = r"at (?P<v>\d+) km an hour for (?P<h>\d+) .* (?P<w>\d+) km an hour slower for (?P<m>\d+)"
SAVING = r"has \$(?P<s>\d+), gets \$(?P<w>\d+) a week and spends \$(?P<x>\d+) .* \$(?P<g>\d+)\?"


@pytest.mark.parametrize(
    ("pattern", "solve"),
    [
        (r"buys (?P<a>\d+) boxes with (?P<b>\d+) .* gives (?P<c>\d+) ", lambda a, b, c: a * b - c),
        (r"costs \$(?P<p>\d+)\. .* (?P<r>\d+)% cheaper, .* \$(?P<c>\d+) off", lambda p, r, c: p - p * r / 100 - c),
        (r"has (?P<n>\d+) \S+ and loses (?P<k>\d+) of them\. .* half .* third", lambda n, k: (n - k) / 2 * 2 / 3),
        (BUSES, lambda n, p, t, s: -(-(n * p + t) // s)),
        (DRIVE, lambda v, h, w, m: v * h + (v - w) * m),
        (SAVING, lambda s, w, x, g: (g - s) / (w - x)),
    ],
)
def test_answers_are_what_the_numbers_in_the_words_give(problems, pattern, solve):
    numbers, answer = find(problems, pattern)
    assert solve(**numbers) == answer


def test_every_template_gives_sensible_whole_answers(problems):
    for problem in problems.make_problems(2000, 0, seed=1)[0]:
        assert isinstance(problem.answer, int)
        assert 0 <= problem.answer < 100_000, problem
    assert len(problems.TEMPLATES) == 16


def test_all_of_the_offline_problems_cannot_be_had(problems):
    with pytest.raises(ValueError, match=r"num_train=-1, .* there is no `all` of them"):
        problems.make_problems(-1, 10, seed=0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.e2e
def test_without_a_hub_its_data_set_is_refused_at_load_with_what_to_do(tmp_path, cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    async def main():
        config = EnvironmentConfig(id="gsm8k", args={"dataset": "hub"})
        async with open_environment(config, logs=tmp_path, root=ENVIRONMENTS, cache=cache, load_timeout_s=300):
            pass

    with pytest.raises(ConfigError, match=r'openai/gsm8k could not be loaded.* - use `dataset = "offline"`'):
        asyncio.run(main())


@pytest.mark.e2e
def test_a_right_number_in_a_box_is_rewarded_in_a_real_worker(tmp_path, cache):
    async def main():
        config = EnvironmentConfig(id="gsm8k", args={"num_train": 12, "num_eval": 4})
        async with open_environment(
            config, logs=tmp_path / "logs", root=ENVIRONMENTS, cache=cache, load_timeout_s=300
        ) as environment:
            assert (environment.num_train, environment.num_eval) == (12, 4)
            silent = await environment.run(RunTask(task="0", index=3), says("I do not know"))
            right = await environment.run(RunTask(task="1", index=3), says(f"so \\boxed{{${silent.answer}.0}}"))
            wrong = await environment.run(RunTask(task="2", index=3), says("\\boxed{-5}"))
            return silent, right, wrong

    outcomes = asyncio.run(main())
    assert [(done.reward, done.metrics["has_box"]) for done in outcomes] == [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    assert outcomes[0].prompt[0]["role"] == "system"


def says(text: str):
    async def ask(question: Ask) -> Reply:
        return Reply(content=text, finish_reason="stop")

    return ask
