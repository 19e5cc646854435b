"""Rules of which only what the data order goes by matters."""

from __future__ import annotations

from typing import Any

from trireme.ledger.rules import Rules


def order_rules(weights: dict[str, float] | None = None, *, seed: int = 0, shuffle: bool = True, **more: Any) -> Rules:
    return Rules(
        seed=seed,
        shuffle=shuffle,
        weights=weights or {"a": 1.0},
        batch_size=more.pop("batch_size", 8),
        group_size=more.pop("group_size", 4),
        max_attempts=3,
        max_async_level=1,
        max_off_policy_steps=8,
        advantage=more.pop("advantage", "group_mean"),
        temperature=1.0,
        **more,
    )
