"""The gsm8k environment: numbers as they are written, problems and their answers, and rollouts in a worker."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from toy_environments import import_shipped, packages_folder, run_one, says, with_package
from trireme.base.errors import ConfigError

answers, problems = import_shipped("gsm8k", "gsm8k_answers"), import_shipped("gsm8k", "gsm8k_problems")


def test_numbers_are_exact_and_read_in_all_their_spellings():
    spellings = ["1,234", "$1,234", r"\$1{,}234", "1234.", "1234.00", r"\frac{2468}{2}", "2468/2", "+1234"]
    assert {answers.to_number(text) for text in [*spellings, r"1234 \text{ apples}"]} == {1234}
    assert answers.is_same_number("1,234", "1234")
    assert (answers.to_number("0.1"), answers.to_number("-3/4")) == (Fraction(1, 10), Fraction(-3, 4))
    assert not answers.is_same_number("0.3333333333333333", "1/3")


def test_what_is_no_number_equals_nothing():
    for text in ["", "-", ".", "twelve", "1/0", "12 13x", "1,23", "1e9", "nan", "9" * 101, "١٢", "3/4/5"]:
        assert (answers.to_number(text), answers.is_same_number(text, text)) == (None, False), text


def test_problems_differ_and_training_never_sees_what_is_evaluated_whatever_the_seed():
    sets = [problems.make_problems(200, 40, seed=seed) for seed in range(3)]
    train, evaluation = ([{problem.question for problem in each[part]} for each in sets] for part in (0, 1))
    assert [len(questions) for questions in train] == [200] * 3
    assert [len(each[1]) for each in sets] == [40] * 3
    assert not set().union(*train) & set().union(*evaluation)
    assert problems.make_problems(200, 40, seed=2) == sets[2]


@pytest.mark.parametrize(
    ("pattern", "solve"),
    [
        (r"buys (\d+) boxes with (\d+) .* gives (\d+) ", lambda a, b, c: a * b - c),
        (r"costs \$(\d+)\. .* (\d+)% cheaper, .* \$(\d+) off", lambda p, r, c: p - p * r / 100 - c),
        (r"has (\d+) \S+ and loses (\d+) of them\. .* half .* third", lambda n, k: (n - k) / 2 * 2 / 3),
        (r"(\d+) classes of (\d+) .* (\d+) teachers\. A bus has (\d+)", lambda n, p, t, s: -(-(n * p + t) // s)),
        (r"at (\d+) km an .* for (\d+) .* (\d+) km .* slower for (\d+)", lambda v, h, w, m: v * h + (v - w) * m),
        (r"has \$(\d+), .* \$(\d+) a .* spends \$(\d+) .* \$(\d+)\?", lambda s, w, x, g: (g - s) / (w - x)),
    ],
)
def test_answers_are_what_the_numbers_in_the_words_give(pattern, solve):
    made = problems.make_problems(2000, 0, seed=0)[0]
    match, answer = next((m, p.answer) for p in made if (m := re.search(pattern, p.question)))
    assert solve(*map(int, match.groups())) == answer


def test_every_template_gives_sensible_whole_answers():
    made = [problem.answer for problem in problems.make_problems(2000, 0, seed=1)[0]]
    assert {type(answer) for answer in made} == {int}
    assert 0 <= min(made) <= max(made) < 100_000
    with pytest.raises(ValueError, match=r"num_train=-1, .* there is no `all` of them"):
        problems.make_problems(-1, 10, seed=0)


def test_without_a_hub_its_data_set_is_refused_at_load_with_what_to_do(tmp_path_factory, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r'openai/gsm8k could not be loaded.* - use `dataset = "offline"`'):
        with_package(packages_folder(tmp_path_factory), "gsm8k", lambda environment: None, dataset="hub")


def test_a_right_number_in_a_box_is_rewarded_in_a_real_worker(tmp_path_factory):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (12, 4)
        silent = await run_one(environment, says("I do not know"), 3)
        right = await run_one(environment, says(f"so \\boxed{{${silent.answer}.0}}"), 3)
        return silent, right, await run_one(environment, says("\\boxed{-5}"), 3)

    outcomes = with_package(packages_folder(tmp_path_factory), "gsm8k", use, num_train=12, num_eval=4)
    assert [(done.reward, done.metrics["has_box"]) for done in outcomes] == [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]
    assert outcomes[0].prompt[0]["role"] == "system"
