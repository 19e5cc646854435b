"""What of a configuration others need to do the same: all that is not at its default, and not of this run alone."""

from __future__ import annotations

from typing import Any

from trireme.config.files import to_table, to_toml, without_secrets
from trireme.config.run import RunConfig
from trireme.config.section import Section
from trireme.config.sft import SftConfig

OWN = (
    *("name", "output_dir", "resume", "ports", "hosts", "wandb", "dashboard"),
    *("inference.server", "orchestrator.server", "trainer.ckpt.resume_step", "ckpt.resume_step"),
)
"""Of this run alone: where it lies, and where its processes meet."""


def choices_of(config: RunConfig | SftConfig) -> str:
    """TOML from which `rl`, or `sft`, makes the same configuration again."""
    return to_toml(without_secrets(_told(to_table(config), to_table(_defaults(config)))))


def _defaults(config: RunConfig | SftConfig) -> Section:
    return type(config)()


def _told(table: dict[str, Any], defaults: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Tables are gone through; lists of tables are told whole."""
    told: dict[str, Any] = {}
    for name, value in table.items():
        key, default = f"{above}{name}", defaults.get(name)
        if key in OWN or value == default:
            continue
        if isinstance(value, dict) and isinstance(default, dict):
            below = _told(value, default, f"{key}.")
            told |= {name: below} if below else {}
        else:
            told[name] = value
    return told


def whole(config: RunConfig | SftConfig) -> str:
    return to_toml(without_secrets(to_table(config)))
