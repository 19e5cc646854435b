"""The game: what is said about a guess, what a guess is worth, and which words there are.

Nothing here needs more than the standard library.
"""

import hashlib
import itertools
import random
import string
from collections import Counter

from wordle_words import WORDS

RIGHT, ELSEWHERE, ABSENT = "G", "Y", "X"
EVAL_SHARE = 0.2  # share of all words; the rest is for training
MOST_STRINGS = 1_000_000  # most strings over an alphabet that the user gives; they are listed in memory
FIRST_QUESTION = "Make your first guess."


def feedback(guess: str, secret: str) -> str:
    """One of G, Y and X per letter.

    A letter that the guess has more often than the secret is marked as often as the secret has it: first where it is
    right, then from left to right.

    Example:
        feedback("eerie", "crepe") -> "YXYXG"
    """
    # Letters of the secret that no right guess has used up.
    left = Counter(theirs for ours, theirs in zip(guess, secret, strict=True) if ours != theirs)
    marks = []
    for ours, theirs in zip(guess, secret, strict=True):
        if ours == theirs:
            marks.append(RIGHT)
        elif left[ours]:
            left[ours] -= 1
            marks.append(ELSEWHERE)
        else:
            marks.append(ABSENT)
    return "".join(marks)


def closeness(guess: str | None, secret: str) -> float:
    """0 to 1: a letter that is right counts fully, one that belongs elsewhere half. 0 for what is no guess."""
    if guess is None:
        return 0.0
    marks = feedback(guess, secret)
    return (marks.count(RIGHT) + marks.count(ELSEWHERE) / 2) / len(secret)


def read_guess(text: str | None, word_length: int) -> str | None:
    """The word guessed, in small letters; None where the text is not one word of that length."""
    word = (text or "").strip().lower()
    return word if len(word) == word_length and set(word) <= set(string.ascii_lowercase) else None


def instructions(word_length: int, max_turns: int, alphabet: str) -> str:
    letters = f" It is made of these letters only: {' '.join(alphabet.upper())}." if alphabet else ""
    return (
        f"You play Wordle. Find the secret word of {word_length} letters with at most {max_turns} guesses.{letters} "
        "Put each guess in <guess> tags. You will be told about each of its letters: G (right), Y (in the word, but "
        "not here) or X (not in the word, or not as often)."
    )


def reply(guess: str | None, secret: str, guesses_left: int) -> str:
    """What the player is told after a guess that did not end the game.

    A line per letter, its mark beside it: nothing to align, however a tokenizer splits a word.

    Example:
        "c G\\nr X\\na Y\\nn X\\ne X\\n4 guesses left."
    """
    left = f"{guesses_left} {'guess' if guesses_left == 1 else 'guesses'} left."
    if guess is None:
        return f"That is not a word of {len(secret)} letters in <guess> tags.\n{left}"
    return "\n".join([*map(" ".join, zip(guess, feedback(guess, secret), strict=True)), left])


def choose_secrets(
    num_train: int, num_eval: int, *, word_length: int, alphabet: str, num_words: int | None, seed: int
) -> tuple[list[str], list[str]]:
    """Different words, as many as asked for or as there are. Training and evaluation never share one."""
    words = _all_words(word_length, alphabet)
    random.Random(seed).shuffle(words)
    # Fewer words make an easier game; the seed decides which ones.
    words = words[:num_words]
    train = [word for word in words if not is_for_eval(word)][:num_train]
    evaluation = [word for word in words if is_for_eval(word)][:num_eval]
    if num_train and not train:
        raise ValueError(
            f"None of {len(words)} words is left for training - expected dozens at least - raise `num_words`, "
            "`word_length` or the number of letters in `alphabet`."
        )
    return train, evaluation


def is_for_eval(word: str) -> bool:
    """A property of the word alone, so that no choice of arguments can mix the two sets."""
    return hashlib.sha256(word.encode()).digest()[0] < 256 * EVAL_SHARE


def check_sizes(*, max_turns: int, num_words: int | None) -> None:
    for name, value in {"max_turns": max_turns, "num_words": num_words}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} - expected 1 or more - raise it.")


def _all_words(word_length: int, alphabet: str) -> list[str]:
    if alphabet:
        return _all_strings(word_length, alphabet)
    words = [word for word in WORDS if len(word) == word_length]
    if not words:
        raise ValueError(
            f"word_length={word_length} - expected {len(WORDS[0])}, the only length of the English words here - change "
            'it, or set `alphabet` (such as "abcdef") to play with all strings of its letters.'
        )
    return words


def _all_strings(word_length: int, alphabet: str) -> list[str]:
    if len(set(alphabet)) < len(alphabet) or not set(alphabet) <= set(string.ascii_lowercase):
        raise ValueError(f'alphabet={alphabet!r} - expected different small letters, such as "abcdef" - change it.')
    if not 1 <= len(alphabet) ** word_length <= MOST_STRINGS or word_length < 1:
        raise ValueError(
            f"word_length={word_length} over {len(alphabet)} letters makes {len(alphabet)}**{word_length} words - "
            f"expected 1 to {MOST_STRINGS:,} - change one of them."
        )
    return ["".join(letters) for letters in itertools.product(alphabet, repeat=word_length)]
