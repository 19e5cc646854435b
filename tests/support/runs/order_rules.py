"""Rules of which only what the data order goes by matters."""

from typing import Any

from trireme.algo.rules import Rules


def order_rules(weights: dict[str, float] | None = None, **more: Any) -> Rules:
    given = {"seed": 0, "shuffle": True, "batch_size": 8, "group_size": 4, "max_attempts": 3, "temperature": 1.0}
    given |= {"max_async_level": 1, "max_off_policy_steps": 8, "advantage": "group_mean"}
    return Rules(weights=weights or {"a": 1.0}, **given | more)
