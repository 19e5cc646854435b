"""Rules that the rows of TRL and of verl share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from trireme.config.translation import Made, Refused, Row, Rule, Settings

Table = dict[str, Any]
HARDWARE = "how the hardware is used follows from the machine here"
OF_DEVIATIONS = "deviations divide by the number of rollouts, theirs by one less: adv_tau is the quotient"
ASK_MODEL = "serve the reward model, and ask it in a reward function."


def as_sample_deviation(kind: str, group: int) -> Settings:
    """Return the factor of advantages with which they are divided by the deviation of a sample of `group` rewards."""
    return {"trainer.loss.adv_tau": math.sqrt(1 - 1 / group)} if kind == "group_mean_std" and group > 1 else {}


def idle(note: str, keys: str, above: str = "") -> Iterator[Row]:
    """Yield rows of keys without effect; that of a table holds for all keys below it that have no row."""
    return (Row(f"{above}{key}", None, note) for key in keys.split())


def guarded(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows with rules that refuse a value of a wrong type, where they would raise an error of Python."""

    def guard(rule: Rule) -> Rule:
        def guarded_rule(value: Any, table: Table) -> Made:
            try:
                return rule(value, table)
            except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError) as error:
                if isinstance(error, Refused):
                    raise
                raise Refused(
                    f"it, or a key that it is computed with, has a wrong value ({error}). Correct it."
                ) from error

        return guarded_rule

    return tuple(replace(row, ours=guard(row.ours)) if callable(row.ours) else row for row in rows)


def only(*values: Any, instead: str) -> Rule:
    """Return a rule for a key that means nothing at these values, and is not supported at others."""

    def rule(value: Any, table: Table) -> str:
        if value not in values:
            raise Refused(f"expected {' or '.join(map(str, values))}: {instead}")
        return "off"

    return rule


def if_given(ours: str) -> Rule:
    return lambda value, table: {ours: value} if value else {}


def if_true(ours: str, value: Any) -> Rule:
    return lambda wanted, table: {ours: value} if wanted else {}


def set_max_norm(value: float, table: Table) -> Settings:
    return {"trainer.optim.max_norm": value or math.inf}


def trust(value: bool, table: Table) -> Settings:
    return {"trainer.model.trust_remote_code": value, "inference.model.trust_remote_code": value}
