"""The line that selects rollouts, as a condition of SQL: the words of the viewer (`eval_view/filters.py`), and `step`,
`group` and `attempt` beside them. Pure.

What a rollout does not have (a dropped one has no reward) fails every test of it, and passes the test turned round.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trireme.tools.rollout_filters import CLOSE, NUMBERS, meaning_of, split_line, term_of

ALL_NUMBERS = (*NUMBERS, "step", "group", "attempt")
COLUMNS = {"rollout": "place", "group": "grp"} | {
    name: name for name in (*ALL_NUMBERS, "env", "stop", "error", "flaws") if name not in ("rollout", "group")
}
FLAGS = {"truncated": "truncated", "failed": "error != ''", "flawed": "flaws != ''"}
SAME = {"=": "=", ":": "=", "!=": "!="}

Value = str | float


@dataclass(frozen=True)
class Query:
    """For `WHERE`. `needs_text` where the texts are to be joined."""

    condition: str = "1"
    values: tuple[Value, ...] = ()
    needs_text: bool = False

    def __and__(self, other: Query) -> Query:
        return Query(
            f"{self.condition} AND {other.condition}",
            self.values + other.values,
            self.needs_text or other.needs_text,
        )


def query_of(line: str) -> Query:
    """Raises: ConfigError where a term cannot be meant so."""
    query = Query()
    for part in split_line(line):
        if term := term_of(part, ALL_NUMBERS):
            meaning_of(term, ALL_NUMBERS)
            query &= _turned(_term(term), bool(term["not"]))
        elif part.startswith("-") and len(part) > 1:
            query &= _turned(_word(part[1:]), True)
        else:
            query &= _word(part)
    return query


def _turned(query: Query, is_turned: bool) -> Query:
    condition = f"NOT COALESCE({query.condition}, 0)" if is_turned else f"COALESCE({query.condition}, 0)"
    return Query(condition, query.values, query.needs_text)


def _word(word: str) -> Query:
    return Query("instr(text, ?) > 0", (word.lower(),), needs_text=True)


def _term(term: re.Match[str]) -> Query:
    field, how, value = term["field"].lower(), term["how"], term["value"]
    if field == "is":
        return Query(f"({FLAGS[value.lower()]})")
    if field in ALL_NUMBERS:
        return _number(COLUMNS[field], how, float(value))
    if field == "example":
        return _example(how, value.lower())
    return _name(f"lowered({COLUMNS[field]})", how, value.lower())


def _number(column: str, how: str, wanted: float) -> Query:
    difference = f"(CASE WHEN abs({column} - ?1) < {CLOSE} THEN 0 ELSE {column} - ?1 END)"
    return Query(f"({difference} {SAME.get(how, how)} 0)".replace("?1", "?"), (wanted,) * 2)


def _example(how: str, value: str) -> Query:
    """A number in the journal, and a name in the files of results."""
    if how in ("<", "<=", ">", ">="):
        return Query(f"(example {how} ?)", (int(value),))
    return _name("CAST(example AS TEXT)", how, value)


def _name(column: str, how: str, value: str) -> Query:
    if how == "~":
        return Query(f"(instr({column}, ?) > 0)", (value,))
    return Query(f"({column} {SAME[how]} ?)", (value,))
