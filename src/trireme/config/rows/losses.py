"""Rules of prime-rl's `[trainer.loss]`, some of whose names mean another loss here."""

from __future__ import annotations

from typing import Any

from trireme.config.rows.rules import value_of
from trireme.config.translation import Made, Rule, Settings

BY_RATIO = ("ppo", "cispo")
"""Losses that prime-rl bounds by ratios, and we by their distance from 1."""

IPO_OF_SEPTEMBER = "with eps 0.3 and kl_tau 0; prime-rl before 2026-09-18 had 0.1 (`ipo_threshold`) and 1e-3"


def set_loss(kind: str, table: dict[str, Any]) -> Made:
    """Tell prime-rl's losses from ours of the same name by the keys that only its own have."""
    given = value_of(table, "trainer", "loss")
    if kind == "default":  # DPPO with a squared KL, whose weight in the loss was not capped
        default = {"kl_tau": 1e-3, "max_importance_ratio": "inf"}
        settings: Settings = {f"trainer.loss.{key}": value for key, value in default.items() if key not in given}
        return {"trainer.loss.type": "dppo_tv"} | settings
    if kind == "ipo" and "ipo_threshold" in given and "kl_tau" not in given:
        return {"trainer.loss.type": "ipo", "trainer.loss.kl_tau": 1e-3}
    if kind == "ipo" and not {"ipo_threshold", "eps"} & given.keys():
        return {"trainer.loss.type": "ipo"}, IPO_OF_SEPTEMBER
    if kind == "icepop" and {"ratio_low", "ratio_high"} & given.keys():  # ours is the paper's, with PPO's clip
        bounds = {"ratio_low": 0.2, "ratio_high": 5.0}
        settings = {f"trainer.loss.{key}": value for key, value in bounds.items() if key not in given}
        return {"trainer.loss.type": "importance"} | settings
    return {"trainer.loss.type": kind}


def set_bound(end: str) -> Rule:
    """Return a rule for `ratio_low` or `ratio_high`."""

    def rule(ratio: float, table: dict[str, Any]) -> Settings:
        kind = value_of(table, "trainer", "loss").get("type")
        if kind is None:  # both bounds were those of the default at the time
            return {"trainer.loss.type": "importance", f"trainer.loss.ratio_{end}": ratio}
        if kind not in BY_RATIO:
            return {f"trainer.loss.ratio_{end}": ratio}
        return {f"trainer.loss.clip_{end}": round(1 - ratio if end == "low" else ratio - 1, 12)}

    return rule
