"""Values as people type them on a command line, read by what the field accepts."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from trireme.config.section import Field

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NONE = ("none", "null")


def read_words(field: Field, words: tuple[str, ...]) -> Any:
    """The value that the words after a flag stand for.

    What cannot be read comes back as text, for the schema to refuse with its own words.

    Example:
        read_words(trainer_gpu_ids, ("0,1",))  # [0, 1]; also from ("0", "1") and ("[0, 1]",)
        read_words(resume, ())                 # True
    """
    if not words:
        return _bare(field)
    if len(words) > 1 and field.kind != "list":
        return " ".join(words)
    if field.optional and words[0].lower() in _NONE:
        return None
    if field.kind == "list":
        return _read_list(field, words)
    return _read_word(field.kind, words[0])


def read_free(words: tuple[str, ...]) -> Any:
    """A value where anything goes (`args` of an environment): JSON or TOML, text otherwise."""
    if not words:
        return True
    text = " ".join(words)
    return _read_word("table", text) if text.lower() not in (*_NONE, "true", "false") else json.loads(_as_json(text))


def _as_json(text: str) -> str:
    return "null" if text.lower() in _NONE else text.lower()


def _bare(field: Field) -> Any:
    """A flag without a value switches on: a truth value, or a table with its defaults."""
    return {"bool": True, "section": {}}.get(field.kind)


def _read_word(kind: str, word: str) -> Any:
    match kind:
        case "bool" if word.lower() in _TRUE:
            return True
        case "bool" if word.lower() in _FALSE:
            return False
        case "integer":
            return _number(word, int)
        case "number":
            return _number(word, float)
        case "section" | "sections" | "table":
            return _structure(word)
    return word


def _number(word: str, to: type[int] | type[float]) -> Any:
    try:
        return to(word)
    except ValueError:
        return word


def _structure(word: str) -> Any:
    for read in (json.loads, lambda text: tomllib.loads(f"value = {text}")["value"]):
        try:
            return read(word)
        except (ValueError, RecursionError):
            continue
    return word


def _read_list(field: Field, words: tuple[str, ...]) -> Any:
    if len(words) == 1 and isinstance(whole := _structure(words[0]), list):
        return whole
    of = next((kind for kind in ("integer", "number") if kind in field.words), "text")
    return [_read_word(of, part.strip()) for word in words for part in word.split(",") if part.strip()]
