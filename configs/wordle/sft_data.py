"""Games of mixed quality, to warm a model up before reinforcement learning.

Only some guesses fit what has been said about the earlier ones. The others repeat an earlier guess or forget the tags:
the model learns how to play, but not that it should. The secrets are those of training.
"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "environments/wordle"))

from wordle_game import FIRST_QUESTION, choose_secrets, feedback, instructions, reply

ALPHABET, WORD_LENGTH, MAX_TURNS = "abcdef", 2, 5
SHARES = {"fitting": 0.35, "untagged": 0.35, "repeated": 0.3}


def conversations(num: int = 8000, seed: int = 1) -> list[dict]:
    train, held_out = choose_secrets(
        10**6, 10**6, word_length=WORD_LENGTH, alphabet=ALPHABET, num_words=None, seed=seed
    )
    rng = random.Random(seed)
    return [{"messages": game(rng.choice(train), sorted(train + held_out), rng)} for _ in range(num)]


def game(secret: str, words: list[str], rng: random.Random) -> list[dict]:
    messages = [
        {"role": "system", "content": instructions(WORD_LENGTH, MAX_TURNS, ALPHABET)},
        {"role": "user", "content": FIRST_QUESTION},
    ]
    guesses: list[str] = []
    for left in reversed(range(MAX_TURNS)):
        kind = rng.choices(list(SHARES), weights=list(SHARES.values()))[0]
        guess = next_guess(kind, guesses, secret, words, rng)
        tagged = kind != "untagged"
        messages.append({"role": "assistant", "content": f"<guess>{guess}</guess>" if tagged else guess})
        if tagged:
            guesses.append(guess)
        if left == 0 or (tagged and guess == secret):
            break
        messages.append({"role": "user", "content": reply(guess if tagged else None, secret, left)})
    return messages


def next_guess(kind: str, guesses: list[str], secret: str, words: list[str], rng: random.Random) -> str:
    if kind == "repeated" and guesses:
        return rng.choice(guesses)
    return rng.choice([word for word in words if fits(word, guesses, secret)])


def fits(word: str, guesses: list[str], secret: str) -> bool:
    """Return whether the word may be the secret, given the feedback on the guesses."""
    return all(marks(guess, word) == marks(guess, secret) for guess in guesses)


@functools.cache
def marks(guess: str, secret: str) -> str:
    return feedback(guess, secret)
