"""The text of each token of a sample, by the run's own tokenizer.

A token's text is what it adds to the text before it. If several tokens make up one character, the last one has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from trireme.base.safe_text import clean
from trireme.messages import Tokens

WINDOW = 1500  # tokens that are shown at once
PART = "▯"  # a token that is only the beginning of a character
SQUARE = "▪"  # an image token

Decode = Callable[[Sequence[int]], str]


def load_decoder(file: Path) -> Decode | None:
    """Load a `tokenizer.json`, which holds no code; None if it is missing or damaged."""
    return _load(file, file.stat().st_mtime_ns) if file.is_file() else None


@lru_cache(maxsize=4)
def _load(file: Path, changed_ns: int) -> Decode | None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing narrower
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def sample_pieces(sample: Tokens, decode: Decode | None) -> list[str]:
    """Return the text of each token of a sample. A picture's tokens are its name and squares."""
    found = pieces(sample.ids.tolist(), decode)
    for picture in sample.pictures:
        squares = [SQUARE] * (picture.num_tokens - 1)
        name = f"[picture {picture.digest[:8]}… {picture.rows}x{picture.columns} tokens]"
        found[picture.place : picture.place + picture.num_tokens] = [name, *squares]
    return found


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """Return the text of each token, or its number if there is no tokenizer."""
    if decode is None:
        return [f"{number} " for number in ids]
    found: list[str] = []
    before: list[int] = []
    waiting: list[int] = []
    for number in ids:
        waiting.append(int(number))
        # a token's text depends on the one before it: spaces and characters of several tokens
        text = decode(before + waiting)[len(decode(before)) :]
        # an incomplete character decodes to a replacement mark, and takes four tokens at most
        if text.endswith("\ufffd") and len(waiting) < 4:
            found.append(PART)
            continue
        found.append(text or PART)
        before, waiting = waiting, []
    return found


def visible(text: str) -> str:
    """Return a token's text, cleaned, with a sign before each line end."""
    return clean(text).replace("\n", "⏎\n") or PART


def window_of(cursor: int, length: int) -> range:
    """Return the window that the cursor is in. Windows do not overlap."""
    start = cursor // WINDOW * WINDOW
    return range(start, min(length, start + WINDOW))
