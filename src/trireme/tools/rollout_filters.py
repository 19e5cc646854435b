"""What a line typed after `/` selects. Pure.

capital of france           rollouts that say all three words, in any case
"capital of" france         a phrase and a word
reward<0.5 turns>=2         numbers: reward, advantage, tokens, turns, rollout, example
example=12 env=wordle       names: example, env, stop, error; `~` for a part of it: stop~length
is:truncated -is:failed     flags: truncated, failed, flawed; `-` in front of anything turns it round
"""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from trireme.base.errors import ConfigError
from trireme.tools.rollouts import Row

TERM = re.compile(r"(?P<not>-?)(?P<field>[A-Za-z_]+)(?P<how><=|>=|!=|<|>|=|~|:)(?P<value>.*)", re.DOTALL)
NUMBERS = ("reward", "advantage", "tokens", "turns", "rollout")
NAMES = ("example", "env", "stop", "error", "flaws")
FLAGS: dict[str, Callable[[Row], bool]] = {
    "truncated": lambda row: row.truncated,
    "failed": lambda row: bool(row.error),
    "flawed": lambda row: bool(row.flaws),
}
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    ":": operator.eq,
    "!=": operator.ne,
}
CLOSE = 1e-9  # of two rewards that are the same

Test = Callable[[Row], bool]


@dataclass(frozen=True)
class Filter:
    """Tests of what the list shows, which are quick, and words that need all of a rollout's text."""

    line: str = ""
    tests: tuple[Test, ...] = ()
    words: tuple[str, ...] = ()  # in lower case
    absent: tuple[str, ...] = ()  # words that must not be there

    @property
    def needs_text(self) -> bool:
        return bool(self.words or self.absent)

    def passes(self, row: Row) -> bool:
        return all(test(row) for test in self.tests)

    def says(self, text: str) -> bool:
        lower = text.lower()
        return all(word in lower for word in self.words) and not any(word in lower for word in self.absent)


def parse(line: str) -> Filter:
    """Raises: ConfigError where a term cannot be meant so."""
    tests: list[Test] = []
    words: list[str] = []
    absent: list[str] = []
    for part in split_line(line):
        if term := term_of(part):
            tests.append(_turned(meaning_of(term), bool(term["not"])))
        elif part.startswith("-") and len(part) > 1:
            absent.append(part[1:].lower())
        else:
            words.append(part.lower())
    return Filter(line.strip(), tuple(tests), tuple(words), tuple(absent))


def term_of(part: str, numbers: Sequence[str] = NUMBERS) -> re.Match[str] | None:
    """None where it is a word to look for."""
    term = TERM.fullmatch(part)
    is_meant = term and (term["field"].lower() in (*numbers, *NAMES, "is") or term["how"] not in ":~")
    return term if is_meant else None


def split_line(line: str) -> list[str]:
    """An apostrophe is a letter; a quote that is still open ends with the line."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.quotes, lexer.escape = True, "", '"', ""
    try:
        return list(lexer)
    except ValueError:
        return split_line(line + '"')


def _turned(test: Test, is_turned: bool) -> Test:
    return (lambda row: not test(row)) if is_turned else test


def meaning_of(term: re.Match[str], numbers: Sequence[str] = NUMBERS) -> Test:
    """Raises: ConfigError where it cannot be meant so."""
    field, how, value = term["field"].lower(), term["how"], term["value"]
    if field == "is":
        return _flag(value.lower())
    if field in numbers:
        return _number_test(field, how, value)
    if field in NAMES:
        return _name_test(field, how, value)
    known = [*numbers, *NAMES, "is"]
    near = get_close_matches(field, known, n=1)
    raise ConfigError(
        f"`{term[0]}`: there is no {field} - expected one of {', '.join(known)}. "
        + (f"Did you mean {near[0]}{how}{value}?" if near else 'Quote it to search for it: ""')
    )


def _flag(name: str) -> Test:
    if name not in FLAGS:
        raise ConfigError(f"`is:{name}`: no rollout is that - expected is:{', is:'.join(FLAGS)}. Type one of these.")
    return FLAGS[name]


def _number_test(field: str, how: str, value: str) -> Test:
    try:
        wanted = float(value)
    except ValueError:
        raise ConfigError(
            f"`{field}{how}{value}`: {value!r} is no number - expected {field}{how}0.5. Mend it."
        ) from None
    if how == "~":
        raise ConfigError(
            f"`{field}~{value}`: {field} is a number - expected <, <=, =, !=, >= or >. Take one of these."
        )
    compare = COMPARE[how]

    def test(row: Row) -> bool:
        found = getattr(row, field)
        if found is None:
            return False
        return compare(0.0 if abs(found - wanted) < CLOSE else found - wanted, 0.0)

    return test


def _name_test(field: str, how: str, value: str) -> Test:
    lower = value.lower()
    if how in ("<", "<=", ">", ">="):
        if field == "example" and value.lstrip("-").isdigit():
            compare, wanted = COMPARE[how], int(value)
            return lambda row: row.example.lstrip("-").isdecimal() and compare(int(row.example), wanted)
        raise ConfigError(f"`{field}{how}{value}`: {field} is a name - expected {field}={value or 'x'}. Use = or ~.")
    if how == "~":
        return lambda row: lower in getattr(row, field).lower()
    return lambda row: COMPARE[how](getattr(row, field).lower(), lower)
