"""The filter line of the viewer and the dashboard. Pure."""

from __future__ import annotations

import operator
import re
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple

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
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
ORDERINGS = ("<", "<=", ">", ">=")
CLOSE = 1e-9  # difference of two numbers that count as equal

_TERM = re.compile(r"(?P<not>-?)(?P<field>[A-Za-z_]+)(?P<op><=|>=|!=|<|>|=|~|:)(?P<value>.*)", re.DOTALL)

_INTEGER = re.compile(r"-?\d+")


class Term(NamedTuple):
    """One condition.

    Example:
        Term("reward", "<", 0.5), Term("stop", "~", "length"), Term("is", "=", "failed"), Term("text", "~", "paris")
    """

    field: str  # one of the numbers or names, "is", or "text" for all messages
    op: str  # a key of `COMPARE`, or "~" for contains
    value: str | float  # in lower case; a number for numbers and for orderings of `example`
    is_negated: bool = False

    def holds(self, row: Row) -> bool:
        """Evaluate a condition on anything but the text. A number that is missing fails, also when compared by `!=`."""
        found = getattr(row, FLAGS[str(self.value)] if self.field == "is" else self.field)
        if self.field == "is":
            holds = bool(found)
        elif isinstance(self.value, str):
            holds = self.value in found.lower() if self.op == "~" else COMPARE[self.op](found.lower(), self.value)
        elif self.field == "example":
            holds = bool(_INTEGER.fullmatch(found)) and COMPARE[self.op](int(found), self.value)
        else:
            holds = found is not None and COMPARE[self.op](
                0.0 if abs(found - self.value) < CLOSE else found - self.value, 0.0
            )
        return holds != self.is_negated


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
        return Term("is", "=", value, is_negated != (op == "!="))

    if field in NUMBERS:
        if op == "~":
            raise ConfigError(f"`{match[0]}`: {field} is a number. Expected <, <=, =, !=, >= or >. Use one of these.")
        try:
            return Term(field, op, float(value), is_negated)
        except ValueError:
            raise ConfigError(
                f"`{match[0]}`: {value!r} is not a number. Expected one, as in {field}{op}0.5. Change it."
            ) from None

    if field in NAMES:
        if op not in ORDERINGS:
            return Term(field, op, value, is_negated)
        if field == "example" and _INTEGER.fullmatch(value):
            return Term(field, op, int(value), is_negated)
        raise ConfigError(f"`{match[0]}`: {field} is a name. Expected {field}={value or 'x'}. Use =, != or ~.")

    known = [*NUMBERS, *NAMES, "is"]
    near = get_close_matches(field, known, n=1)
    raise ConfigError(
        f"`{match[0]}`: there is no field {field}. Expected one of {', '.join(known)}. "
        + (f"Did you mean {near[0]}{op}{value}?" if near else "To search for it as text, type a space before the sign.")
    )
