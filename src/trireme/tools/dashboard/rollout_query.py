"""The filter line of `tools/rollout_filters.py` as a condition of SQL, with three more numbers. Pure.

A value that a rollout does not have (a dropped one has no reward) fails every test, and passes the negated test.
"""

from __future__ import annotations

from dataclasses import dataclass

from trireme.tools.rollout_filters import CLOSE, NUMBERS, Term, parse_filter

ALL_NUMBERS = (*NUMBERS, "step", "group", "attempt")
COLUMNS = {"rollout": "place", "group": "grp"}  # where the table has another name than the filter
FLAGS = {"truncated": "truncated", "failed": "error != ''", "flawed": "flaws != ''"}


@dataclass(frozen=True)
class Query:
    """A condition for `WHERE`. With `needs_text`, the table of texts has to be joined."""

    condition: str = "1"
    values: tuple[str | float, ...] = ()
    needs_text: bool = False

    def __and__(self, other: Query) -> Query:
        return Query(
            f"{self.condition} AND {other.condition}",
            self.values + other.values,
            self.needs_text or other.needs_text,
        )


def query_of(line: str) -> Query:
    """Raises: ConfigError where a term has no meaning."""
    query = Query()
    for term in parse_filter(line, ALL_NUMBERS).terms:
        condition, values = _condition(term)
        known = f"COALESCE({condition}, 0)"
        query &= Query(f"NOT {known}" if term.is_negated else known, values, needs_text=term.field == "text")
    return query


def _condition(term: Term) -> tuple[str, tuple[str | float, ...]]:
    column = COLUMNS.get(term.field, term.field)
    if term.field == "is":
        return f"({FLAGS[str(term.value)]})", ()
    if term.field == "text":
        return "instr(text, ?) > 0", (term.value,)
    if term.field == "example":  # a number in the journal, and a name in a filter
        column = "example" if not isinstance(term.value, str) else "CAST(example AS TEXT)"
    elif isinstance(term.value, str):
        column = f"lowered({column})"
    else:
        difference = f"(CASE WHEN abs({column} - ?) < {CLOSE} THEN 0 ELSE {column} - ? END)"
        return f"({difference} {term.op} 0)", (term.value, term.value)
    return (f"(instr({column}, ?) > 0)" if term.op == "~" else f"({column} {term.op} ?)"), (term.value,)
