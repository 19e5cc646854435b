"""Rules that the rows of TRL and of verl share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from trireme.config.translation import Refused, Row, Rule, Settings, value_at

Table = dict[str, Any]
HARDWARE = "how the hardware is used follows from the machine here"
OF_DEVIATIONS = "deviations divide by the number of rollouts, theirs by one less"
ASK_MODEL = "serve the reward model, and ask it in a reward function."


def of(table: Table, key: str, default: Any = None) -> Any:
    """Return the value of a dotted key of theirs."""
    return value_at(table, tuple(key.split(".")), default)


def idle(note: str, keys: str, above: str = "") -> Iterator[Row]:
    """Yield rows of keys without effect; that of a table holds for all keys below it that have no row."""
    return (Row(f"{above}{key}", None, note) for key in keys.split())


def guarded(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows with rules that refuse a value of a wrong type, where they would raise an error of Python."""

    def guard(rule: Rule) -> Rule:
        def guarded_rule(value: Any, table: Table) -> Settings | str:
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


def sampling(key: str, evaluates: Callable[[Table], bool], off: Any = None) -> Rule:
    """Return a rule for a key of training and, if the run evaluates, of evaluation, which would begin by such a key.

    Args:
        off: the value by which the system switches it off.
    """

    def rule(value: Any, table: Table) -> Settings:
        tables = ("orchestrator.sampling", *(["orchestrator.eval.sampling"] if evaluates(table) else []))
        return {} if value in (None, off) else {f"{each}.{key}": value for each in tables}

    return rule


def lora(key: str, switch: str) -> Rule:
    """Return a rule for a key of adapters, which another key switches on."""

    def rule(value: Any, table: Table) -> Settings | str:
        if not of(table, switch):
            return f"{switch} is off"
        listed = [value] if isinstance(value, str) and key in ("target_modules", "modules_to_save") else value
        return {} if value is None else {f"trainer.model.lora.{key}": listed}

    return rule


def split_gpus(num_gpus: int, tp: int) -> Settings:
    """Give half of the GPUs to engines, in whole ones, and the others to the trainer. Both share a single one."""
    if num_gpus == 1:
        return {"inference_gpu_ids": [0], "trainer_gpu_ids": [0]}
    engines = max(1, num_gpus // 2 // tp) * tp
    return {"inference_gpus": engines, "trainer_gpus": num_gpus - engines}


def set_max_norm(value: float, table: Table) -> Settings:
    return {"trainer.optim.max_norm": value or math.inf}


def trust(value: bool, table: Table) -> Settings:
    return {"trainer.model.trust_remote_code": value, "inference.model.trust_remote_code": value}
