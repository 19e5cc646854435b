"""The wordle environment: the rules of the game, and whole games in a worker."""

from __future__ import annotations

import itertools
import re

import pytest

from toy_environments import import_shipped, packages_folder, run_one, with_package
from trireme.orchestrator.environments.wire import Ask, Reply

game = import_shipped("wordle", "wordle_game")
ANY = {"word_length": 5, "alphabet": "", "num_words": None, "seed": 0}


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


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"word_length": 6}, "expected 5, the only length"),
        ({"alphabet": "aab"}, "expected different small letters"),
        ({"alphabet": "abcdefghij", "word_length": 9}, "makes 10..9 words"),
        ({"alphabet": "a", "word_length": 1, "num_words": 0}, "raise `num_words`"),
    ],
)
def test_arguments_that_allow_no_game_are_refused_with_advice(arguments, advice):
    with pytest.raises(ValueError, match=advice):
        game.choose_secrets(10, 1, **ANY | arguments)


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
