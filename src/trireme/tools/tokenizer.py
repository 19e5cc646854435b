"""The text of single tokens, by the tokenizer of a run.

A token's text is what it adds to the text before it; where several tokens make up one character, the last one has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from trireme.base.paths import RunPaths, step_of
from trireme.tools.rollouts import clean

PART = "▯"  # a token that is the beginning of a character
WINDOW = 1500  # tokens shown at once

Decode = Callable[[Sequence[int]], str]


def find_decoder(home: Path) -> Decode | None:
    """Of the run's tokenizer: beside its exported weights, or its model's. None where neither is here."""
    for file in _candidates(home):
        if file.is_file() and (decode := _load(file, file.stat().st_mtime_ns)):
            return decode
    return None


def _candidates(home: Path) -> list[Path]:
    paths = RunPaths(home)
    exported = sorted(paths.weights.glob("step_*"), key=lambda folder: step_of(folder) or 0, reverse=True)
    return [folder / "tokenizer.json" for folder in (*exported, *_model(paths))]


def _model(paths: RunPaths) -> list[Path]:
    """Its folder, or where what was downloaded lies."""
    try:
        name = json.loads(paths.run_config.read_bytes())["model"]["name"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    if not isinstance(name, str) or Path(name).is_dir():
        return [Path(str(name))]
    return [found.parent] if (found := _downloaded(name)) else []


def _downloaded(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


@lru_cache(maxsize=4)
def _load(file: Path, changed_ns: int) -> Decode | None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing narrower
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def pieces(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """The text of each token; its number where there is no tokenizer."""
    if decode is None:
        return [f"{number} " for number in ids]
    found: list[str] = []
    before: list[int] = []
    waiting: list[int] = []
    for number in ids:
        waiting.append(int(number))
        text = decode(before + waiting)[len(decode(before)) :]
        if text.endswith("\ufffd") and len(waiting) < 4:
            found.append(PART)
            continue
        found.append(text or PART)
        before, waiting = waiting, []
    return found


def visible(text: str) -> str:
    """A line end shows itself before it ends the line."""
    return clean(text).replace("\n", "⏎\n") or PART


def window_of(cursor: int, length: int) -> range:
    """The window that the cursor is in; windows do not overlap."""
    start = cursor // WINDOW * WINDOW
    return range(start, min(length, start + WINDOW))
