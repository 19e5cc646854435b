"""The small environments that are shipped: their data and rules, and rollouts in a worker.

wordle: guess a word by feedback. alphabet-sort: sort a list that grows. gsm8k: answer with a number in a box.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import pytest

from toy_environments import import_shipped, packages_folder, run_all, run_one, says, with_package
from trireme.base.errors import ConfigError
from trireme.orchestrator.environments.wire import Ask, Reply

game = import_shipped("wordle", "wordle_game")
episodes = import_shipped("alphabet_sort", "alphabet_sort_episodes")
numbers, problems = import_shipped("gsm8k", "gsm8k_answers"), import_shipped("gsm8k", "gsm8k_problems")
ANY = {"word_length": 5, "alphabet": "", "num_words": None, "seed": 0}
BOUNDS = {"num_turns": (1, 3), "names_per_turn": (1, 4), "items": "names", "sort_by": "any", "seed": 0}
MARK = " // new name!"


@pytest.mark.parametrize(
    ("make", "arguments", "advice"),
    [
        (game.choose_secrets, ANY | {"word_length": 6}, "expected 5, the only length"),
        (game.choose_secrets, ANY | {"alphabet": "aab"}, "expected different small letters"),
        (game.choose_secrets, ANY | {"alphabet": "abcdefghij", "word_length": 9}, "makes 10..9 words"),
        (game.choose_secrets, ANY | {"alphabet": "a", "word_length": 1, "num_words": 0}, "raise `num_words`"),
        (episodes.make_episodes, BOUNDS | {"items": "numbers"}, "expected one of 'names', 'letters'"),
        (episodes.make_episodes, BOUNDS | {"sort_by": "middle"}, "expected one of 'any', 'first', 'last'"),
        (episodes.make_episodes, BOUNDS | {"num_turns": (3, 2)}, "expected 1 <= min_turns <= max_turns"),
        (episodes.make_episodes, BOUNDS | {"names_per_turn": (0, 2)}, "expected 1 <= min_names_per_turn"),
        (
            episodes.make_episodes,
            BOUNDS | {"items": "letters", "num_turns": (1, 9)},
            "36 different letters",
        ),
        (problems.make_problems, {"seed": 0}, r"num_train=-1, .* there is no `all` of them"),
    ],
)
def test_arguments_that_allow_no_example_are_refused_with_advice(make, arguments, advice):
    with pytest.raises(ValueError, match=advice):
        make(-1 if make is problems.make_problems else 10, 1, **arguments)


# wordle


def feedback_by_crossing_out(guess: str, secret: str) -> str:
    """The rules as one plays them on paper: cross out what is right, then look for each other letter in the rest."""
    paper, marks = list(secret), ["X"] * len(guess)
    for place, letter in enumerate(guess):
        if paper[place] == letter:
            marks[place], paper[place] = "G", "-"
    for place, letter in enumerate(guess):
        if marks[place] == "X" and letter in paper:
            marks[place] = "Y"
            paper[paper.index(letter)] = "-"
    return "".join(marks)


def test_feedback_is_that_of_a_player_with_paper_for_every_guess_and_secret():
    assert game.feedback("eerie", "crepe") == "YXYXG"  # the last e is right, one more e is left for the other two
    for letters, length in [("abc", 4), ("abcd", 3)]:
        words = ["".join(word) for word in itertools.product(letters, repeat=length)]
        for guess, secret in itertools.product(words, repeat=2):
            assert game.feedback(guess, secret) == feedback_by_crossing_out(guess, secret), (guess, secret)


def test_a_guess_is_a_word_of_the_right_length_and_a_letter_elsewhere_counts_half():
    texts = [None, "", "cran", "cranes", "cr ne", "crané", "12345", "\n CRANE "]
    assert [game.read_guess(text, 5) for text in texts] == [None] * 7 + ["crane"]
    closeness = [game.closeness(*words) for words in (("crane", "crane"), ("eerie", "crepe"), (None, "crane"))]
    assert closeness == [1, (1 + 2 / 2) / 5, 0]


def test_no_word_is_both_trained_on_and_evaluated_on_whatever_the_arguments():
    assert len(set(game.WORDS)) == len(game.WORDS) > 800
    assert all(re.fullmatch("[a-z]{5}", word) for word in game.WORDS)
    choices = [("", 5, None, 0), ("", 5, None, 1), ("", 5, 300, 2), ("abcdef", 3, None, 0), ("abcd", 5, 500, 1)]
    keys = ("alphabet", "word_length", "num_words", "seed")
    sets = [game.choose_secrets(400, 50, **dict(zip(keys, choice, strict=True))) for choice in choices]
    assert all(len(train) > 100 and len(evaluation) > 20 for train, evaluation in sets)
    assert not set().union(*(train for train, _ in sets)) & set().union(*(evaluation for _, evaluation in sets))
    assert game.choose_secrets(400, 50, **ANY) == sets[0] != sets[1]


async def play_by_the_feedback(question: Ask) -> Reply:
    """The first word that fits all that was said: it finds any secret that three letters out of four can make."""
    answers = [message["content"].split("\n")[:-1] for message in question.messages if message["role"] == "user"]
    told = [("".join(line[0] for line in lines), "".join(line[2] for line in lines)) for lines in answers[1:]]
    words = map("".join, itertools.product("abcd", repeat=3))
    guess = next(word for word in words if all(feedback_by_crossing_out(was, word) == marks for was, marks in told))
    return Reply(content=f"I try <guess>{guess}</guess>.", finish_reason="stop")


async def say_nothing_of_use(question: Ask) -> Reply:
    return Reply(content="<guess>abcd</guess>" if len(question.messages) == 2 else "a b c", finish_reason="stop")


def test_the_wordle_package_plays_whole_games_and_rewards_the_quicker_one(tmp_path_factory):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (56, 8)
        won = [await run_one(environment, play_by_the_feedback, i) for i in range(56)]
        return won, await run_one(environment, say_nothing_of_use, split="eval")

    args = {"alphabet": "abcd", "word_length": 3, "max_turns": 9}
    won, lost = with_package(packages_folder(tmp_path_factory), "wordle", use, **args)
    for game in won:
        turns = game.metrics["num_turns"]
        assert (game.stop, len(game.completion)) == ("word_found", 2 * turns - 1)
        assert f"<guess>{game.answer}</guess>" in game.completion[-1]["content"]
        assert game.reward == pytest.approx(0.5 + 0.2 + 0.2 * (10 - turns) / 9 + 0.1)
    assert len({game.metrics["num_turns"] for game in won}) > 3
    assert (lost.stop, lost.reward, lost.metrics["num_turns"]) == ("max_turns_reached", 0.0, 9)
    assert lost.completion[1]["content"] == "That is not a word of 3 letters in <guess> tags.\n8 guesses left."
    assert lost.completion[-2]["content"].endswith("\n1 guess left.")


# alphabet-sort


def test_the_right_answer_of_an_episode_worked_by_hand():
    turns = (("Mia Stone", "Ada West"), ("Leo Hall",), ("Zoe Bell", "Ben Zhang"))
    ben, leo, zoe = "Ben Zhang // new name!", "Leo Hall // new name!", "Zoe Bell // new name!"
    assert episodes.Episode(turns, "first").expected() == [
        ["Ada West", "Mia Stone"],
        ["Ada West", leo, "Mia Stone"],
        ["Ada West", ben, "Leo Hall", "Mia Stone", zoe],
    ]
    assert episodes.Episode(turns, "last").expected()[2] == [zoe, "Leo Hall", "Mia Stone", "Ada West", ben]
    text = "\n  Ada West // new name!\n\nLeo Hall //new name!\nMia Stone\n"  # a name and its mark are two items
    assert episodes.items_in(text) == ["Ada West", "// new name!", "Leo Hall", "// new name!", "Mia Stone"]


MARKED, UNMARKED = [item for i in range(150) for item in (str(i), "// new name!")], [str(i) for i in range(150)]


@pytest.mark.parametrize(
    ("given", "expected", "similarity"),
    [
        (["a", "b", "c"], ["a", "b", "c"], 1),
        (["a", "c", "b"], ["a", "b", "c"], 2 * 2 / 6),
        (["a", "b"], ["a", "b", "// new name!"], 2 * 2 / 5),
        ([], ["a"], 0),
        (None, ["a"], 0),
        # `SequenceMatcher` leaves out what it takes for junk in lists of 200 and more, unless it is told not to.
        (MARKED, MARKED[:-1], 2 * 299 / 599),
        (UNMARKED + MARKED, MARKED + UNMARKED, 2 * 300 / 900),
    ],
)
def test_similarity_is_twice_the_items_in_common_blocks_over_all_items(given, expected, similarity):
    assert episodes.similarity(given, expected) == pytest.approx(similarity)


@pytest.mark.parametrize("items", ["names", "letters"])
def test_episodes_keep_their_bounds_have_one_right_order_and_are_either_trained_on_or_evaluated_on(items):
    names: tuple[set, set] = set(), set()
    for seed, turns in [(0, (1, 3)), (1, (1, 1)), (2, (2, 5))]:
        bounds = BOUNDS | {"items": items, "seed": seed, "num_turns": turns}
        sets = episodes.make_episodes(200, 50, **bounds)
        assert sets == episodes.make_episodes(200, 50, **bounds)
        assert sets != episodes.make_episodes(200, 50, **bounds | {"seed": 9})
        assert {len(episode.turns) for episode in sets[0]} == set(range(turns[0], turns[1] + 1))
        assert {len(turn) for episode in sets[0] for turn in episode.turns} == {1, 2, 3, 4}
        for seen, some in zip(names, sets, strict=True):
            seen.update(frozenset(sum(episode.turns, ())) for episode in some)
    assert len(names[0]) > 300
    assert not names[0] & names[1]
    for of_episode in names[0] | names[1]:
        for part in (0, -1):
            assert len({name.split()[part] for name in of_episode}) == len(of_episode)


def sorted_answer(question: Ask, *, marks: bool = True, combined: bool = True) -> str:
    """Read from the conversation alone, as a policy must."""
    asked = [message["content"] for message in question.messages if message["role"] == "user"]
    names = [re.search(r": (.*)", content)[1].split(", ") for content in asked]
    part = -1 if "by last name" in asked[0] else 0
    ordered = sorted((name for some in names for name in some), key=lambda name: name.split()[part])
    lines = [name + MARK * (marks and len(asked) > 1 and name in names[-1]) for name in ordered]
    tag = "combined_" * (combined and len(asked) > 1) + "alphabetical_sorted"
    return f"<{tag}>\n{chr(10).join(lines)}\n</{tag}>"


def answers(**options: Any) -> Callable[[Ask], Awaitable[Reply]]:
    async def ask(question: Ask) -> Reply:
        return Reply(content=f"Here you are:\n{sorted_answer(question, **options)}", finish_reason="stop")

    return ask


def test_the_alphabet_sort_package_rewards_every_turn_by_how_nearly_it_is_sorted(tmp_path_factory):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (20, 5)
        policies = (answers(), answers(marks=False), answers(combined=False))
        return await asyncio.gather(*(run_all(environment, policy, 20) for policy in policies))

    args = {"min_turns": 2, "max_turns": 4, "num_train": 20, "num_eval": 5, "similarity_power": 2}
    done = with_package(packages_folder(tmp_path_factory), "alphabet-sort", use, **args)
    assert {len(rollout.info["expected"]) for rollout in done[0]} == {2, 3, 4}
    for right, unmarked, untagged in zip(*done, strict=True):
        turns = len(right.info["expected"])
        assert (right.reward, right.metrics["exact_turns"], right.stop) == (1.0, 1.0, "all_turns_answered")
        assert right.metrics["num_turns"] == len(right.completion) // 2 + 1 == turns
        assert {name for name in right.metrics if "turn_" in name} == {f"similarity_turn_{n + 1}" for n in range(turns)}
        assert untagged.reward == untagged.metrics["answered_turns"] == pytest.approx(1 / turns)
        assert unmarked.reward == pytest.approx(sum(map(worth_without_marks, right.info["expected"])) / turns)


def worth_without_marks(expected: list[str]) -> float:
    """By the formula: all names in common, no mark; squared, as `similarity_power` says."""
    names = sum(item != MARK.strip() for item in expected)
    return (2 * names / (len(expected) + names)) ** 2


# gsm8k


def test_numbers_are_exact_and_read_in_all_their_spellings():
    spellings = ["1,234", "$1,234", r"\$1{,}234", "1234.", "1234.00", r"\frac{2468}{2}", "2468/2", "+1234"]
    assert {numbers.to_number(text) for text in [*spellings, r"1234 \text{ apples}"]} == {1234}
    assert numbers.is_same_number("1,234", "1234")
    assert (numbers.to_number("0.1"), numbers.to_number("-3/4")) == (Fraction(1, 10), Fraction(-3, 4))
    assert not numbers.is_same_number("0.3333333333333333", "1/3")


def test_what_is_no_number_equals_nothing():
    for text in ["", "-", ".", "twelve", "1/0", "12 13x", "1,23", "1e9", "nan", "9" * 101, "١٢", "3/4/5"]:
        assert (numbers.to_number(text), numbers.is_same_number(text, text)) == (None, False), text


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
