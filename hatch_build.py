"""Wheels bring along what `trireme lab setup` sets up; an editable installation reads it from the checkout.

A hook rather than `force-include`, which would copy it into editable installations as well, where it goes stale.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PARTS = ("configs", "environments", "models")


class ShippedData(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"] |= {part: f"trireme/shipped/{part}" for part in PARTS}
