"""The task itself: which texts there are, and how an answer is scored. Needs the standard library only."""

import hashlib
import random
from collections.abc import Iterator
from difflib import SequenceMatcher

from reverse_text_words import WORDS

SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
EVAL_SHARE = 0.2  # share of all texts; the rest is for training
DRAWS_PER_TEXT = 50  # short texts repeat often; after so many draws per text that is wanted, there are no more


def similarity(answer: str | None, expected: str) -> float:
    """Of the answer and the reversed text, 0 to 1."""
    return SequenceMatcher(None, answer or "", expected).ratio()


def make_texts(
    num_train: int, num_eval: int, *, min_length: int, max_length: int, seed: int
) -> tuple[list[str], list[str]]:
    """Different texts, as many as asked for or as there are. Training and evaluation never share one."""
    # Dicts keep the order of the draws, and no text comes twice.
    train: dict[str, None] = {}
    evaluation: dict[str, None] = {}
    draws = _draw_texts(random.Random(seed), min_length=min_length, max_length=max_length)
    for _ in range(DRAWS_PER_TEXT * (num_train + num_eval)):
        if len(train) >= num_train and len(evaluation) >= num_eval:
            break
        text = next(draws)
        wanted, limit = (evaluation, num_eval) if is_for_eval(text) else (train, num_train)
        if len(wanted) < limit:
            wanted[text] = None

    # Bounds may allow so few texts that all of them are for evaluation.
    if num_train and not train:
        raise ValueError(
            f"No text of {min_length} to {max_length} letters is left for training - expected a wider range, such as "
            "3 to 24 - lower `min_length` or raise `max_length`."
        )
    return list(train), list(evaluation)


def is_for_eval(text: str) -> bool:
    """A property of the text alone, so that no choice of seed or sizes can mix the two sets."""
    return hashlib.sha256(text.encode()).digest()[0] < 256 * EVAL_SHARE


def _draw_texts(rng: random.Random, *, min_length: int, max_length: int) -> Iterator[str]:
    """Endless: words are joined until the next one no longer fits, or chance ends the text where it is long enough."""
    words = [word for word in WORDS if len(word) <= max_length]
    if not words or min_length > max_length:
        raise ValueError(
            f"min_length={min_length} and max_length={max_length} allow no text - expected "
            f"min_length <= max_length, and max_length >= {min(map(len, WORDS))} - change them."
        )
    while True:
        text = rng.choice(words)
        while len(text) < min_length or rng.random() < 0.5:
            longer = f"{text} {rng.choice(words)}"
            if len(longer) > max_length:
                break
            text = longer
        if len(text) >= min_length:
            yield text
