"""The wordle environment: the rules of the game, and the whole of it in a worker of its own."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import re
from pathlib import Path

import pytest

from trireme.config.orchestrator import Environment as EnvironmentConfig
from trireme.orchestrator.environments.pool import open_environment
from trireme.orchestrator.environments.wire import Ask, Reply, RunTask

ENVIRONMENTS = Path(__file__).parents[2] / "environments"


@pytest.fixture(scope="module")
def game():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENVIRONMENTS / "wordle")
        yield importlib.import_module("wordle_game")


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


@pytest.mark.parametrize(("letters", "length"), [("abc", 5), ("abcd", 4), ("abcdef", 3)])
def test_feedback_is_that_of_a_player_with_paper_for_every_guess_and_secret(game, letters, length):
    words = ["".join(word) for word in itertools.product(letters, repeat=length)]
    for guess, secret in itertools.product(words, repeat=2):
        assert game.feedback(guess, secret) == feedback_by_crossing_out(guess, secret), (guess, secret)


@pytest.mark.parametrize(
    ("guess", "secret", "marks"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "moist", "XXXXX"),
        ("eerie", "crepe", "YXYXG"),  # the last e is right, one more e is left for the other two
        ("speed", "abide", "XXYXY"),
        ("allow", "llama", "YGYXX"),
        ("llama", "allow", "YGYXX"),
    ],
)
def test_letters_that_come_twice_are_marked_as_often_as_the_secret_has_them(game, guess, secret, marks):
    assert game.feedback(guess, secret) == marks


def test_closeness_counts_a_right_letter_fully_and_one_that_belongs_elsewhere_half(game):
    assert game.closeness("crane", "crane") == 1
    assert game.closeness("eerie", "crepe") == (1 + 2 / 2) / 5
    assert game.closeness(None, "crane") == 0


@pytest.mark.parametrize("text", [None, "", "cran", "cranes", "cr ne", "crané", "12345"])
def test_only_a_word_of_the_right_length_is_a_guess(game, text):
    assert game.read_guess(text, 5) is None
    assert game.read_guess("\n CRANE ", 5) == "crane"


def test_the_words_are_different_words_of_five_letters(game):
    assert len(set(game.WORDS)) == len(game.WORDS) > 800
    assert all(re.fullmatch("[a-z]{5}", word) for word in game.WORDS)


def test_no_word_is_both_trained_on_and_evaluated_on_whatever_the_arguments(game):
    choices = [("", 5, None, 0), ("", 5, None, 1), ("", 5, 300, 2), ("abcdef", 3, None, 0), ("abcd", 5, 500, 1)]
    train, evaluation = set(), set()
    for alphabet, length, num_words, seed in choices:
        some, others = game.choose_secrets(
            400, 50, word_length=length, alphabet=alphabet, num_words=num_words, seed=seed
        )
        assert len(some) > 100
        assert len(others) > 20
        train.update(some)
        evaluation.update(others)
    assert not train & evaluation


def test_the_words_depend_on_the_seed_and_on_nothing_else(game):
    def choose(seed):
        return game.choose_secrets(100, 20, word_length=5, alphabet="", num_words=None, seed=seed)

    assert choose(0) == choose(0) != choose(1)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"word_length": 6}, "expected 5, the only length"),
        ({"alphabet": "aab"}, "expected different small letters"),
        ({"alphabet": "abcdefghij", "word_length": 9}, "makes 10..9 words"),
        ({"alphabet": "a", "word_length": 1, "num_words": 0}, "raise `num_words`"),
    ],
)
def test_arguments_that_allow_no_game_are_refused_with_advice(game, arguments, advice):
    with pytest.raises(ValueError, match=advice):
        game.choose_secrets(10, 1, **{"word_length": 5, "alphabet": "", "num_words": None, "seed": 0} | arguments)


def consistent(guess: str, told: list[tuple[str, str]]) -> bool:
    return all(feedback_by_crossing_out(earlier, guess) == marks for earlier, marks in told)


def told_so_far(question: Ask) -> list[tuple[str, str]]:
    """Guesses and marks, read from what the environment said."""
    answers = [message["content"].split("\n")[:-1] for message in question.messages if message["role"] == "user"]
    return [("".join(line[0] for line in lines), "".join(line[2] for line in lines)) for lines in answers[1:]]


async def play_by_the_feedback(question: Ask) -> Reply:
    """The first word that fits all that was said: it finds any secret that three letters out of four can make."""
    words = ("".join(word) for word in itertools.product("abcd", repeat=3))
    guess = next(word for word in words if consistent(word, told_so_far(question)))
    return Reply(content=f"I try <guess>{guess}</guess>.", finish_reason="stop")


async def say_nothing_of_use(question: Ask) -> Reply:
    return Reply(content="<guess>abcd</guess>" if len(question.messages) == 2 else "a b c", finish_reason="stop")


@pytest.mark.e2e
def test_the_wordle_package_plays_whole_games_and_rewards_the_quicker_one(tmp_path):
    async def use(environment):
        assert (environment.num_train, environment.num_eval) == (56, 8)
        won = [await environment.run(RunTask(task=f"{i}", index=i), play_by_the_feedback) for i in range(56)]
        lost = await environment.run(RunTask(task="lost", split="eval", index=0), say_nothing_of_use)
        return won, lost

    async def main():
        config = EnvironmentConfig(id="wordle", args={"alphabet": "abcd", "word_length": 3, "max_turns": 9})
        async with open_environment(
            config, logs=tmp_path / "logs", root=ENVIRONMENTS, cache=tmp_path / "cache"
        ) as environment:
            return await use(environment)

    won, lost = asyncio.run(main())
    for game in won:
        turns = game.metrics["num_turns"]
        assert game.stop == "word_found"
        assert len(game.completion) == 2 * turns - 1
        assert f"<guess>{game.answer}</guess>" in game.completion[-1]["content"]
        assert game.reward == pytest.approx(0.5 + 0.2 + 0.2 * (10 - turns) / 9 + 0.1)
    assert len({game.metrics["num_turns"] for game in won}) > 3
    assert (lost.stop, lost.reward, lost.metrics["num_turns"]) == ("max_turns_reached", 0.0, 9)
    assert lost.completion[1]["content"] == "That is not a word of 3 letters in <guess> tags.\n8 guesses left."
    assert lost.completion[-2]["content"].endswith("\n1 guess left.")
