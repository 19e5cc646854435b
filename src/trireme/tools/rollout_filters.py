"""The filter line of the viewer and the dashboard. Pure."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from typing import NamedTuple

from trireme.base.errors import ConfigError
from trireme.tools.rollouts import Record, Row

SYNTAX = """\
two words    rollouts that say both, in any case; quotes make a phrase
reward<0.5   also advantage, tokens, turns, rollout, step, group, attempt,
             and > >= <= = !=
example=12   also env, stop, error, flaws; ~ for a part of it: stop~len
is:failed    also is:truncated and is:flawed
-word        rollouts without it; - negates any of these terms"""
"""The syntax of the filter line, for users."""

NUMBERS = ("reward", "advantage", "tokens", "turns", "rollout", "step", "group", "attempt")
NAMES = ("example", "env", "stop", "error", "flaws")
FLAGS = {"truncated": "truncated", "failed": "error", "flawed": "flaws"}
"""The field of each flag. The flag is set where the field is not empty."""
CLOSE = 1e-9  # difference of two numbers that count as equal
MOST = 2**63 - 1  # largest whole number that SQLite takes

Range = tuple[float, float]

_TERM = re.compile(r"(?P<not>-?)(?P<field>[A-Za-z_]+)(?P<op><=|>=|!=|<|>|=|~|:)(?P<value>.*)", re.DOTALL)

_INTEGER = re.compile(r"-?\d+")


class Term(NamedTuple):
    """One condition. The viewer evaluates it on rows, and the dashboard in SQL.

    Example:
        Term("reward", "outside", (0.5, inf)), Term("stop", "~", "length"), Term("error", "is set")
    """

    field: str  # field of a row, or "text" for all messages
    op: str  # "within", "outside", "is set", "~" for contains, "=" or "!="
    value: str | Range = ""  # a text in lower case; of "within" and "outside" the lowest and the highest number
    is_negated: bool = False

    def holds(self, row: Row) -> bool:
        """Evaluate a condition on anything but the text. A number that is missing is neither within nor outside."""
        found = getattr(row, self.field)
        if isinstance(self.value, tuple):
            number = _whole(found) if isinstance(found, str) else found
            holds = number is not None and (self.value[0] <= number <= self.value[1]) == (self.op == "within")
        elif self.op == "is set":
            holds = bool(found)
        elif self.op == "~":
            holds = self.value in found.lower()
        else:
            holds = (found.lower() == self.value) == (self.op == "=")
        return holds != self.is_negated

    def sql(self) -> tuple[str, list[str | float]]:
        """Return the same condition on the index of rollouts, with its values: no SQL is made of what a user typed."""
        column, values = f'"{self.field}"', list[str | float]()
        # an example is a number in the index; SQLite's own `lower` knows ASCII alone
        text = {"text": column, "example": f"CAST({column} AS TEXT)"}.get(self.field, f"lowered({column})")
        if isinstance(self.value, tuple):
            condition = f"{column} {'NOT ' * (self.op == 'outside')}BETWEEN ? AND ?"
            values += self.value
        elif self.op == "is set":
            condition = f"{column} NOT IN ('', 0)"
        else:
            condition = f"instr({text}, ?) > 0" if self.op == "~" else f"{text} {self.op} ?"
            values.append(self.value)
        return (f"NOT COALESCE({condition}, 0)" if self.is_negated else condition), values


class Filter(NamedTuple):
    """Conditions that hold at once."""

    line: str = ""
    terms: tuple[Term, ...] = ()

    def matches(self, row: Row, read: Callable[[Row], Record]) -> bool:
        """Evaluate all conditions. The record is read only if there are words to look for and all else holds."""
        words = [term for term in self.terms if term.field == "text"]
        if not all(term.holds(row) for term in self.terms if term.field != "text"):
            return False
        text = read(row).text.lower() if words else ""
        return all((str(word.value) in text) != word.is_negated for word in words)


def parse_filter(line: str) -> Filter:
    """Parse what a user typed. Raises ConfigError for an unknown field, or a value that does not fit its field."""
    terms = []
    for part in _split(line):
        match = _TERM.fullmatch(part)
        # `http://x` has a sign too: an unknown field is text, unless the sign is a comparison
        if match and (match["field"].lower() in (*NUMBERS, *NAMES, "is") or match["op"] not in ":~"):
            terms.append(_term(match))
        else:
            is_negated = part.startswith("-") and len(part) > 1
            terms.append(Term("text", "~", part[is_negated:].lower(), is_negated))
    return Filter(line.strip(), tuple(terms))


def _split(line: str) -> list[str]:
    """Split at spaces outside of double quotes. An apostrophe is a letter, and an open quote ends with the line."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.quotes, lexer.escape = True, "", '"', ""
    try:
        return list(lexer)
    except ValueError:
        return _split(line + '"')


def _term(match: re.Match[str]) -> Term:
    # `:` is another way to write `=`
    field, op, value, is_negated = match["field"].lower(), match["op"], match["value"].lower(), bool(match["not"])
    op = "=" if op == ":" else op

    if field == "is":
        if value not in FLAGS:
            raise ConfigError(
                f"`{match[0]}`: there is no flag {value!r}. Expected is:{', is:'.join(FLAGS)}. Type one of these."
            )
        if op not in ("=", "!="):
            raise ConfigError(f"`{match[0]}`: a rollout is {value} or not. Expected is:{value} or -is:{value}.")
        return Term(FLAGS[value], "is set", is_negated=is_negated != (op == "!="))

    if field in NUMBERS:
        if op == "~":
            raise ConfigError(f"`{match[0]}`: {field} is a number. Expected <, <=, =, !=, >= or >. Use one of these.")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(
                f"`{match[0]}`: {value!r} is not a number. Expected one, as in {field}{op}0.5. Change it."
            ) from None
        return Term(field, *_range(op, number - CLOSE, number + CLOSE), is_negated)

    if field in NAMES:
        if op in ("=", "!=", "~"):
            return Term(field, op, value, is_negated)
        if field == "example" and (whole := _whole(value)) is not None:
            whole = max(-MOST, min(whole, MOST))
            return Term(field, *_range(op, whole, whole), is_negated)
        raise ConfigError(f"`{match[0]}`: {field} is a name. Expected {field}={value or 'x'}. Use =, != or ~.")

    known = [*NUMBERS, *NAMES, "is"]
    near = get_close_matches(field, known, n=1)
    raise ConfigError(
        f"`{match[0]}`: there is no field {field}. Expected one of {', '.join(known)}. "
        + (f"Did you mean {near[0]}{op}{value}?" if near else "To search for it as text, type a space before the sign.")
    )


def _whole(text: str) -> int | None:
    return int(text) if _INTEGER.fullmatch(text) else None


def _range(op: str, low: float, high: float) -> tuple[str, Range]:
    """Return a comparison with a number as a range. Numbers from `low` to `high` count as equal to it."""
    ranges = {"=": (low, high), "<=": (-math.inf, high), ">=": (low, math.inf)}
    opposites = {"!=": "=", ">": "<=", "<": ">="}
    return ("within", ranges[op]) if op in ranges else ("outside", ranges[opposites[op]])
