"""Models that pictures are given to (`[model.vlm]`): which can be trained with them, read from `config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trireme.config.trainer import TrainerModel

KINDS = ("qwen2_5_vl", "qwen3_5", "qwen3_5_moe")
"""Architectures (`model_type`) whose pictures are read as `algo/pictures.py` says."""


def vision_problems(table: str, model: TrainerModel, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a model with this config.json cannot be trained with pictures; nothing where none are asked for.

    Args:
        table: the name of the table as the user writes it, for messages.
    """
    if model.vlm is None:
        return
    if config.get("model_type") not in KINDS or "vision_config" not in config:
        name, kind = model.name or "this model", config.get("model_type")
        yield (
            f"`[{table}.vlm]` with {name} ({kind}), to which Trireme cannot give pictures - expected a model_type of "
            f"{', '.join(KINDS)}, and a vision_config, in its config.json. Remove the table, or choose another model."
        )
    if model.cp > 1:
        yield (
            f"{table}.cp = {model.cp} with `[{table}.vlm]` - expected 1, as ranks that share a row cannot share its "
            f"pictures yet. Set `{table}.cp = 1`."
        )
